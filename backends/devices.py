"""Devices: which device a captured step runs on, what is refused there, and its runtime."""

from __future__ import annotations

import tempfile
import warnings
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch

from cotrain_compile import presets
from cotrain_compile.backends.lifecycle.compiled_step import CompiledStep
from cotrain_compile.errors import ON_META, OptionError
from cotrain_compile.graph import StepGraph
from cotrain_compile.machine import Machine
from cotrain_compile.options import Options
from cotrain_compile.options.parts import LoweringOptions, PlanningOptions
from cotrain_compile.placement.problem import Problem
from cotrain_compile.plan import Plan
from cotrain_compile.runtime.calibrate.first_use import measured_drive, measured_machine
from cotrain_compile.runtime.cuda.setup import cuda_device, cuda_machine
from cotrain_compile.runtime.device import Device
from cotrain_compile.runtime.disk.drive import Drive
from cotrain_compile.runtime.disk.resting_kernel import resting_kernels
from cotrain_compile.runtime.emulated import EmulatedDevice
from cotrain_compile.runtime.host.fused_kernel import HostKernel
from cotrain_compile.runtime.host.pieces import piecewise_tasks
from cotrain_compile.runtime.process.cores import Cores

_CPU = torch.device("cpu")


def compute_device_of(step: StepGraph) -> torch.device:
    """The device that the step was traced on: the accelerator where it has tensors on one."""
    return max(_traced_devices(step), key=lambda device: device != _CPU)


def runs_on_cuda(step: StepGraph) -> bool:
    """Whether the step runs on a CUDA device; else it runs on the emulated one."""
    return compute_device_of(step).type == "cuda"


def refuse_other_devices(step: StepGraph, options: LoweringOptions) -> None:
    """Raise `OptionError` unless the step runs on the CPU or on one CUDA device, as asked for."""
    found = sorted(str(device) for device in _traced_devices(step) if device != _CPU)
    if "meta" in found:
        raise OptionError(f"the step has tensors on meta: {ON_META}")
    if len(found) > 1 or any(not name.startswith("cuda") for name in found):
        raise OptionError(
            f"the step has tensors on {' and '.join(found)}, but it runs on the CPU or on one CUDA "
            "device; move model and batch there"
        )
    if found and options.device == "cpu":
        raise OptionError(
            f"option 'device' is 'cpu', but the step has tensors on {found[0]}; move model and "
            "batch to the CPU, or leave the option out"
        )


def tell_of_unused_card(step: StepGraph, options: LoweringOptions) -> None:
    """Warn where a step runs on the emulated device though there is a card, and nobody asked."""
    if options.device is None and torch.cuda.is_available() and not runs_on_cuda(step):
        warnings.warn(
            "cotrain: the model is on the CPU, so the step runs on the emulated device though this "
            "computer has a CUDA device; move model and batch there, or set the option device to "
            '"cuda" (for a model larger than the card) or to "cpu"',
            stacklevel=2,
        )


def refuse_gradients_of_hosted(
    compiled: CompiledStep, values: Sequence[Any], keeping_gradient: Collection[int]
) -> None:
    """Raise `OptionError` where a parameter at home on the host would get a gradient on a card.

    torch allows no such `.grad`. A plan keeps both together where the gradient is a tensor of its
    own. `keeping_gradient` are ids of those of the user's tensors `values` that have a gradient
    after the step.
    """
    placement, kept = compiled.plan.placement, compiled.problem.dataflow.kept_gradients
    apart = [
        item.name
        for item, value in zip(compiled.graph.inputs, values, strict=True)
        if id(value) in keeping_gradient
        and placement.is_off_device(item.name)
        and item.name not in kept
    ]
    if apart and runs_on_cuda(compiled.graph):
        raise OptionError(
            f"the step leaves gradients in .grad of {len(apart)} parameters that rest on the host, "
            f"in memory that is not theirs alone (first: {apart[0]}): parts of one tensor, or "
            "returned by the step as well; give each a tensor of its own, call zero_grad() at the "
            "start or the end of the step without keep_grads, or raise memory_budget"
        )


def machine_for(step: StepGraph, options: PlanningOptions) -> Machine:
    """The machine that `options` name; "this-machine" is the one that the step runs on.

    That is measured when it is first met, or else guessed at: see `first_use`. So is the drive of
    the option `disk`, where the machine has none. Raises `DiskError` where that has no room.
    """
    machine = _machine_in_memory(step, options)
    if options.disk is None or machine.disk is not None:
        return machine
    return machine.with_disk(measured_drive(options.disk))


def _machine_in_memory(step: StepGraph, options: PlanningOptions) -> Machine:
    if options.machine == presets.THIS_MACHINE:
        measured = measured_machine(compute_device_of(step))
        if measured is not None:
            return measured
    if runs_on_cuda(step):
        return cuda_machine(options.machine, compute_device_of(step))
    return presets.find(options.machine)


def runtime_for(
    placed: StepGraph,
    problem: Problem,
    plan: Plan,
    kernels: Mapping[str, HostKernel],
    options: Options,
) -> Device:
    """The device that carries out the tasks of `placed`, of which `problem` has the costs.

    What `plan` has on disk rests in the folder of the options.
    """
    device: Device
    piecewise = piecewise_tasks(placed, kernels)
    if runs_on_cuda(placed):
        device = cuda_device(
            compute_device_of(placed),
            problem.machine,
            problem.budgets,
            kernels,
            piecewise,
            host_cores=Cores.one_thread_each(options.host_cores),
            timed=options.timeline,
        )
    else:
        device = EmulatedDevice(
            problem.machine,
            problem.budgets,
            kernels,
            piecewise,
            host_cores=Cores.one_thread_each(options.host_cores),
            throttle=options.throttle,
            poison=options.poison,
            network_s=problem.costs.network_s,
        )
    device.watchdog_s = options.watchdog_s
    if plan.placement.uses_disk:
        resting = resting_kernels(placed, plan.placement, kernels)
        folder = options.disk or tempfile.gettempdir()
        device.use(Drive(folder, problem.dataflow, plan, resting))
    return device


def _traced_devices(step: StepGraph) -> set[torch.device]:
    """Where the inputs are that the step reads: `functional_call` may replace those of a module."""
    inputs = step.module.graph.find_nodes(op="placeholder")
    values = [node.meta.get("val") for node in inputs if node.users]
    return {value.device for value in values if isinstance(value, torch.Tensor)} or {_CPU}

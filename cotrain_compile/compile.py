"""Compile: the steps from a user's training step to a `CompiledStep`, put in order.

`cotrain` is what torch.compile calls for `backend="cotrain"`; `compile_step` reads like the list of
types in `docs/architecture.md`.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from typing import Any

import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import tree_leaves

from cotrain_compile.analysis.costs import CostTable
from cotrain_compile.analysis.symbolic import at
from cotrain_compile.backends.compiled_step import CompiledStep
from cotrain_compile.backends.per_shape import PerShape
from cotrain_compile.capture import Session, capture, current_session, install
from cotrain_compile.capture.hook import frame_objects
from cotrain_compile.dataflow import Dataflow
from cotrain_compile.errors import CaptureError, CotrainError, OptionError, PlanError
from cotrain_compile.extract import extract
from cotrain_compile.files import load
from cotrain_compile.graph import StepGraph
from cotrain_compile.machine import Machine, Tier
from cotrain_compile.options import Options
from cotrain_compile.passes import run_passes
from cotrain_compile.placement.check import check
from cotrain_compile.placement.problem import Problem, formulate
from cotrain_compile.placement.solve import SolveSettings, solve
from cotrain_compile.plan import Plan
from cotrain_compile.presets import find
from cotrain_compile.runtime.emulated import EmulatedDevice
from cotrain_compile.runtime.host_kernels import host_kernels
from cotrain_compile.units import format_bytes
from cotrain_compile.viz.describe import describe_differences
from cotrain_compile.viz.dump import dump_step


def cotrain(
    module: fx.GraphModule,
    example_inputs: Sequence[Any],
    *,
    options: Mapping[str, Any] | None = None,
    mode: str | None = None,
) -> Callable[..., Any]:
    """The backend behind `torch.compile(step, backend="cotrain", options={...})`."""
    session = current_session()
    if session is None:
        raise CaptureError('call it as torch.compile(step, backend="cotrain")')
    if mode is not None:
        raise OptionError(f"backend 'cotrain' has no mode {mode!r}; see docs/options.md")

    def compile_captured(step: StepGraph, values: Sequence[Any]) -> Callable[..., Any]:
        if _trace_only.get():
            raise _Traced(step)
        _refuse_other_devices(values, session.options)
        dataflow = extract(step)

        def compile_for(sizes: Mapping[str, int]) -> CompiledStep:
            compiled = compile_step(step, at(dataflow, sizes), session.options)
            _register(compiled, session)
            return compiled

        if not dataflow.symbols:
            return compile_for({})
        return PerShape(step, dataflow.symbols, compile_for)

    return capture(session, module, example_inputs, compile_captured)


def trace(
    build: Callable[[], tuple[Callable[..., Any], tuple[Any, ...]]], *, dynamic: bool = False
) -> Dataflow:
    """The `Dataflow` of a step of any size, without allocating it or running it.

    `build()` returns the step function and its example arguments. It runs under fake tensors, so a
    model of any size can be built in it, on any machine. With `dynamic`, sizes of the arguments
    (batch, sequence length) are symbols: see `analysis.symbolic`. Raises `CaptureError` as
    compiling does.
    """
    return extract(trace_graph(build, dynamic=dynamic))


def trace_graph(
    build: Callable[[], tuple[Callable[..., Any], tuple[Any, ...]]], *, dynamic: bool = False
) -> StepGraph:
    """As `trace`, the step graph itself."""
    with FakeTensorMode():
        step, arguments = build()
        token = _trace_only.set(True)
        try:
            if dynamic:
                _let_sizes_vary(arguments)
            torch.compile(step, backend=cotrain, dynamic=None if dynamic else False)(*arguments)
        except _Traced as traced:
            return traced.step
        finally:
            _trace_only.reset(token)
    raise CaptureError("build() returned a step that torch.compile did not trace")


def _let_sizes_vary(arguments: tuple[Any, ...]) -> None:
    """Make every dimension of the tensors in `arguments` a symbol, where the step allows it."""
    for tensor in tree_leaves(arguments):
        if isinstance(tensor, torch.Tensor):
            for dimension in range(tensor.dim()):
                torch._dynamo.maybe_mark_dynamic(tensor, dimension)


_trace_only: ContextVar[bool] = ContextVar("cotrain_trace_only", default=False)


class _Traced(CotrainError):
    """Ends a trace that is only for looking at; carries the captured step."""

    def __init__(self, step: StepGraph) -> None:
        super().__init__("traced")
        self.step = step


def compile_step(step: StepGraph, dataflow: Dataflow, options: Options) -> CompiledStep:
    """Place, rewrite and lower `step`, whose `dataflow` has the sizes to plan for."""
    machine = find(options.machine)
    problem = formulate(dataflow, machine, budgets(options, machine), _profile(options))
    plan = plan_for(problem, options)
    check(problem, plan)
    placed = run_passes(step, plan)
    device = EmulatedDevice(
        machine,
        problem.budgets,
        host_kernels(placed, options.host_kernels),
        throttle=options.throttle,
        poison=options.poison,
    )
    compiled = CompiledStep(problem, plan, placed, device)
    if options.dump is not None:
        with _as_option_error("dump", options.dump):
            dump_step(Path(options.dump), step, dataflow, compiled.plan, placed)
    return compiled


@contextmanager
def _as_option_error(option: str, value: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise OptionError(f"option {option!r} is {value!r}: {error.strerror}") from error


def plan_for(problem: Problem, options: Options) -> Plan:
    """The plan in the file that `options` name, else what the solver finds for their policy.

    Raises `PlacementError` with the shortfall when the policy does not fit the budgets, and as
    `saved_plan` does.
    """
    if options.plan is not None:
        return saved_plan(options.plan, problem, options)
    settings = SolveSettings(
        policy=options.policy,
        solver=options.solver,
        time_limit_s=options.time_limit,
        seed=options.seed,
    )
    return solve(problem, settings)


def saved_plan(path: str, problem: Problem, options: Options) -> Plan:
    """The plan saved at `path`, made for the step of `problem`, on whichever machine.

    Raises `PlanError` when it was made for another step, with up to three differences, or for more
    memory than `options` allow; `OptionError` and `FormatError` when there is no plan in the file.
    """
    with _as_option_error("plan", path):
        plan = load(path, Plan)
    dataflow = problem.dataflow
    differences = describe_differences(plan, dataflow)
    if differences or plan.fingerprint != dataflow.fingerprint:
        told = "; ".join(differences[:3]) or "names agree, but shapes or arguments of ops differ"
        raise PlanError(
            f"plan {path} was made for another step ({plan.fingerprint}, this one is "
            f"{dataflow.fingerprint}): {told}; trace and solve this step again"
        )
    _refuse_more_memory(path, plan, problem, options)
    return plan


def _refuse_more_memory(path: str, plan: Plan, problem: Problem, options: Options) -> None:
    asked = {
        Tier.DEVICE: ("memory_budget", options.memory_budget),
        Tier.HOST: ("host_memory_budget", options.host_memory_budget),
    }
    for tier, (option, size) in asked.items():
        # Where the user set no budget, what counts is what the plan needs of this machine.
        needed = plan.predicted.peak_bytes[tier] if size is None else plan.budgets[tier]
        if needed > problem.budgets[tier]:
            raise PlanError(
                f"plan {path} was made for {format_bytes(needed)} on the {tier.value}, but "
                f"{option} is {format_bytes(problem.budgets[tier])}; raise it, or solve the step "
                f"again with --{option.replace('_', '-')} {problem.budgets[tier]}"
            )


def budgets(options: Options, machine: Machine) -> dict[Tier, int]:
    """Bytes allowed on each tier: what the user set, else the tier's capacity."""
    return options.budgets(machine)


def _profile(options: Options) -> CostTable | None:
    if options.profile is None:
        return None
    with _as_option_error("profile", options.profile):
        return load(options.profile, CostTable)


def inspect(step: Callable[..., Any]) -> CompiledStep:
    """The `CompiledStep` behind a function compiled with this backend, after its first call.

    Where it was compiled more than once (another batch shape, a learning rate that became an
    input), the one that ran last. Raises `CotrainError` when there is none.
    """
    function: Any = getattr(step, "_torchdynamo_orig_callable", step)
    function = getattr(function, "__func__", function)
    code = getattr(function, "__code__", None)
    key = frame_objects(code, function.__closure__) if code is not None else ()
    found = [c for c, session in _compiled.items() if session == (code, key)]
    if not found:
        raise CotrainError(
            'this step has not been compiled yet: compile it with backend="cotrain" and call it '
            "once before inspecting it"
        )
    return max(found, key=lambda compiled: compiled.last_run_s)


def synchronize() -> None:
    """Wait until every compiled step has finished all its work.

    A step is complete when it returns, so there is nothing to wait for; training loops may call it
    before they read the clock.
    """


_compiled: weakref.WeakKeyDictionary[CompiledStep, tuple[Any, tuple[int, ...]]]
_compiled = weakref.WeakKeyDictionary()


def _register(compiled: CompiledStep, session: Session) -> None:
    _compiled[compiled] = (session.code, session.frame_objects)


def _refuse_other_devices(values: Sequence[Any], options: Options) -> None:
    devices = {v.device.type for v in values if isinstance(v, torch.Tensor)} - {"cpu"}
    if devices or options.device == "cuda":
        found = f"the step has tensors on {', '.join(devices)}" if devices else "device is 'cuda'"
        raise OptionError(
            f"{found}, but this version runs steps on the emulated device only; keep model and "
            "batch on the CPU and leave the option device out"
        )


def _our_options(compiler_fn: object) -> Mapping[str, Any] | None:
    """The user's options when `compiler_fn` stands for this backend, else None."""
    while hasattr(compiler_fn, "_torchdynamo_orig_backend"):
        compiler_fn = compiler_fn._torchdynamo_orig_backend
    if compiler_fn is cotrain:
        return {}
    if getattr(compiler_fn, "compiler_fn", None) is cotrain:
        options: Mapping[str, Any] = getattr(compiler_fn, "kwargs", {}).get("options") or {}
        return options
    return None


install(_our_options)

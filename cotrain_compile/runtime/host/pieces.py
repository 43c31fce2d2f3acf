"""Pieces: which updates on the host go in pieces, so that copies and update of a parameter overlap.

In: a placed graph and its host kernels. Out: a `Piecewise` for each large parameter's update, for
the copy of the gradient that it follows, and for the way back of the weight, which follows it.
The plan has these tasks one after the other, so a step is at most as long as predicted
(`docs/decisions/0017-pieces-and-bundles.md`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace

import torch
from torch import fx

from cotrain_compile.graph import StepGraph
from cotrain_compile.runtime.course import Piecewise
from cotrain_compile.runtime.host.fused_kernel import FusedKernel, HostKernel
from cotrain_compile.runtime.host.speculation import Confirm, Guess
from cotrain_compile.runtime.task_nodes import Offload, Prefetch, RegionCall, region_calls, view_of

# Of the parameter. A link takes about a millisecond for it, so that what starting a copy and waking
# a thread take is a small part.
PIECE_BYTES = 1 << 24


def piecewise_tasks(placed: StepGraph, kernels: Mapping[str, HostKernel]) -> dict[str, Piecewise]:
    """How each task goes that goes in pieces, by its name; most steps have none."""
    found: dict[str, Piecewise] = {}
    for _, call in region_calls(placed.module.graph):
        name, inputs = call.launch.task, call.inputs
        kernel, confirms = _updating(kernels[name])
        if not isinstance(kernel, FusedKernel) or kernel.after is not None:
            continue  # what runs behind the loop needs all of it
        if call.launch.bundle:
            continue  # one of many small ones, which go as a whole
        param = inputs[kernel.positions["param"]]
        states = [inputs[position].meta["val"] for position in kernel.positions.values()]
        how = _piecewise(param.meta["val"])
        if how is None or not all(_has_rows_of(param.meta["val"], state) for state in states):
            continue
        gradient = "" if confirms else _copied_gradient(call, kernel, param)
        if gradient:
            found[gradient] = how
        found[name] = replace(how, follows=gradient)
        found |= {back: replace(how, follows=name) for back in _ways_back(param, name)}
    return found


def _updating(kernel: HostKernel) -> tuple[HostKernel, bool]:
    """What updates in the end, and whether all is there before it confirms what was guessed."""
    if isinstance(kernel, Guess | Confirm):
        return kernel.speculation.kernel, isinstance(kernel, Confirm)
    return kernel, False


def _piecewise(param: torch.Tensor) -> Piecewise | None:
    """Rows of about `PIECE_BYTES`; None where there would be one piece, or memory has gaps."""
    if not param.dim() or not param.numel() or not _is_whole(param):
        return None
    count = param.shape[0]
    rows = max(1, PIECE_BYTES * count // param.nbytes)
    return Piecewise(rows, param.numel() // count, -(-count // rows)) if rows < count else None


def _has_rows_of(param: torch.Tensor, state: torch.Tensor) -> bool:
    """Whether a state goes with the rows of its parameter; a step count goes with all of them."""
    return not state.dim() or (state.shape == param.shape and state.is_contiguous())


def _is_whole(value: torch.Tensor) -> bool:
    """Whether the elements of `value` lie in order and are all that its storage has."""
    return value.is_contiguous() and value.untyped_storage().nbytes() == value.nbytes


def _copied_gradient(call: RegionCall, kernel: FusedKernel, param: fx.Node) -> str:
    """The copy of the gradient, if the update reads it row by row; "" where it does not.

    The copy of the weight is waited for as a whole: its way back would overwrite what is still to
    be copied.
    """
    if kernel.gradient.shown is None:
        return ""
    gradient = call.inputs[kernel.gradient.shown]
    match view_of(gradient):
        case Offload(destination=None, launch=launch) if (
            launch.task in call.launch.after and not launch.bundle
        ):
            is_alike = _is_copied_alike(gradient.meta["val"], param.meta["val"])
            return launch.task if is_alike else ""
        case _:
            return ""


def _is_copied_alike(value: torch.Tensor, param: torch.Tensor) -> bool:
    return value.numel() == param.numel() and _is_whole(value)


def _ways_back(param: fx.Node, update: str) -> Iterator[str]:
    """The copies of the new weight over the one on the device."""
    for user in param.users:
        match view_of(user):
            case Prefetch(source=source, launch=launch, destination=fx.Node() as old) if (
                source is param
                and update in launch.after
                and not launch.bundle
                and _is_whole(old.meta["val"])
            ):
                yield launch.task

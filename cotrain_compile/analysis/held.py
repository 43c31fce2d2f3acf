"""Held: the bytes that values inside of compiled kernels take of memory.

In: a `Dataflow`. Out: bytes by buffer, of those that take fewer than they have: what one kernel
makes and alone reads is in registers, if nothing of the step should come between its maker and its
last reader: no other kernel, no end of a layer, where a segment ends, no update and no exchange.

A kernel has all that it reads and all that it makes at once, though, and a plan counts op by op.
So one value of each kernel stands for what is not there when it is, with at most its own bytes:
nobody plans for more than op by op. Values of the forward are whole: a plan may keep them for what
it makes again.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from cotrain_compile.analysis.fusion import kernels, used_inside
from cotrain_compile.analysis.layers import layers_of
from cotrain_compile.dataflow import Dataflow, Op, Phase, Role
from cotrain_compile.machine.op_classes import FUSIBLE, OpKind

_MADE_WHERE_READ = frozenset({OpKind.POINTWISE, OpKind.NORM})


def held_bytes(dataflow: Dataflow) -> Mapping[str, int]:
    """Of each value that takes fewer bytes of memory in compiled code than it has: those."""
    kernel = kernels(dataflow)
    inside = used_inside(dataflow, kernel) - _collected(dataflow)
    spans = _spans(dataflow)
    of_kernel: dict[tuple[str, int], _Kernel] = {}
    for number, op in zip(_stretches(dataflow), dataflow.ops, strict=True):
        if number and op.name in kernel:
            of_kernel.setdefault((kernel[op.name], number), _Kernel([])).ops.append(op)
    held: dict[str, int] = {}
    for each in of_kernel.values():
        held |= each.held(dataflow, inside, spans)
    return held


def holding(dataflow: Dataflow, held: Mapping[str, int]) -> Dataflow:
    """The same step, whose buffers have as many bytes as `held` says, where it says any."""
    if not held:
        return dataflow
    buffers = (
        replace(buffer, nbytes=held[buffer.name]) if buffer.name in held else buffer
        for buffer in dataflow.buffers
    )
    return replace(dataflow, buffers=tuple(buffers))


@dataclass(frozen=True)
class _Span:
    """The places in the step of the first and the last op that touch a buffer."""

    first: int
    last: int


@dataclass(frozen=True)
class _Kernel:
    """What of a kernel lies between two places where a segment may end."""

    ops: list[Op]

    def held(
        self, dataflow: Dataflow, inside: set[str], spans: Mapping[str, _Span]
    ) -> dict[str, int]:
        """What its values take; the one that stands for what has died or is yet to be made."""
        ends = dataflow.position[self.ops[-1].name]
        gone = {
            name
            for op in self.ops
            if op.kind in _MADE_WHERE_READ
            for name in op.writes
            if name in inside
            and dataflow.buffer[name].role is Role.TEMPORARY
            and spans[name].last <= ends
        }
        if not gone:
            return {}
        others = {name for op in self.ops for name in op.touched} - gone
        most_bytes = _nbytes(dataflow, others)
        missing: list[tuple[int, str]] = []
        for op in self.ops:
            place = dataflow.position[op.name]
            there = (n for n in others if spans[n].first <= place <= spans[n].last)
            own = [name for name in op.touched if name in gone]
            largest = max(own, key=lambda name: dataflow.buffer[name].nbytes, default="")
            missing.append((most_bytes - _nbytes(dataflow, there), largest))
        held = dict.fromkeys(gone, 0)
        nbytes, _ = min(missing)
        if nbytes:
            nbytes, name = min(each for each in missing if each[1])
            held[name] = min(dataflow.buffer[name].nbytes, nbytes)
        return held


def _collected(dataflow: Dataflow) -> set[str]:
    """What has memory of its own where a region runs in parts: each part writes its rows there."""
    windows = [window for region in dataflow.regions for window in region.windows]
    found = {each.buffer for window in windows for each in window.collected}
    return found | {each.buffer for window in windows for each in window.counted}


def _stretches(dataflow: Dataflow) -> list[int]:
    """The stretch of ops that each op is in, none of which ends a kernel; 0 for what does."""
    layer = layers_of(dataflow)
    roles = {buffer.name: buffer.role for buffer in dataflow.buffers}
    updating = {name for group in dataflow.updates for name in group.ops}
    found: list[int] = []
    number, before = 1, ""
    for op in dataflow.ops:
        if not op.writes and not op.awaits:
            found.append(0)
            continue
        ends = (
            op.kind not in FUSIBLE
            or op.phase is not Phase.BACKWARD
            or op.name in updating
            or op.collective is not None
            or bool(op.awaits)
            or any(roles[name] is Role.RNG for name in op.touched)
        )
        if ends or layer[op.name] != before:
            number, before = number + 1, layer[op.name]
        found.append(0 if ends else number)
    return found


def _spans(dataflow: Dataflow) -> dict[str, _Span]:
    first = {buffer.name: -1 for buffer in dataflow.buffers if buffer.is_input}
    last: dict[str, int] = {}
    for place, op in enumerate(dataflow.ops):
        for name in op.touched:
            first.setdefault(name, place)
            last[name] = place
    end = len(dataflow.ops)
    stays = {buffer.name for buffer in dataflow.buffers if buffer.is_input or buffer.is_output}
    return {name: _Span(first[name], end if name in stays else at) for name, at in last.items()}


def _nbytes(dataflow: Dataflow, names: Iterable[str]) -> int:
    return sum(dataflow.buffer[name].nbytes for name in names)

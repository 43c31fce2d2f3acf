"""Resting kernel: an update on the host of what rests on disk, run in pieces as they come.

In: a kernel that updates in memory, and at which of its inputs the states are that rest on disk,
or the parameter. The kernel gets rooms in their place, piece by piece; all else of the parameter,
its gradient and its way back to the device go along as they do without a disk.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx

from cotrain_compile.graph import StepGraph
from cotrain_compile.machine import Tier
from cotrain_compile.plan import Placement
from cotrain_compile.plan.on_disk import PIECE_BYTES
from cotrain_compile.runtime.course import Course
from cotrain_compile.runtime.disk.rooms import Passing, Room, Rooms
from cotrain_compile.runtime.disk.state_files import file_of
from cotrain_compile.runtime.host.fused_kernel import FusedKernel, HostKernel
from cotrain_compile.runtime.host.gradient_prologue import cache_rows, in_pieces
from cotrain_compile.runtime.meter import MemoryMeter
from cotrain_compile.runtime.task_nodes import region_calls


@dataclass(frozen=True)
class RestingKernel:
    """Runs `kernel` on what passes through rooms, of the inputs at `places`.

    The last of them is the gradient with `gradient_rests`, which is only read. It is `late` where
    the step writes some gradient that rests there: then nothing is read before its turn. What is no
    loop through rows in order works on the mappings of the files instead.
    """

    kernel: HostKernel
    places: Sequence[int]
    gradient_rests: bool = False
    late: bool = False

    def ask(self, rooms: Rooms, inputs: Sequence[Any]) -> Passing | None:
        """Let what rests begin to come; None where it is late, or works on the mappings."""
        return None if self.late else self._asked(rooms, inputs)

    def _asked(self, rooms: Rooms, inputs: Sequence[Any]) -> Passing | None:
        files = [file for place in self.places if (file := file_of(inputs[place])) is not None]
        kernel = self.kernel
        if not isinstance(kernel, FusedKernel) or kernel.after is not None:
            return None
        if self.gradient_rests and kernel.gradient.shown != self.places[-1]:
            return None  # it is no row of the gradient that comes by pieces
        own = [inputs[place] for place in {*kernel.positions.values(), *self.places}]
        if len(files) < len(self.places) or not all(tensor.is_contiguous() for tensor in own):
            return None
        if len({(inputs[place].nbytes, inputs[place].dtype) for place in self.places}) > 1:
            return None
        return rooms.ask(files, files[0].nbytes, read_only=int(self.gradient_rests))

    def __call__(
        self,
        inputs: Sequence[Any],
        meter: MemoryMeter,
        course: Course,
        rooms: Rooms,
        passing: Passing | None,
    ) -> None:
        """Update; returns when all is on disk. Raises `DiskError` and what the kernel raises."""
        if self.late:
            passing = self._asked(rooms, inputs)
        if passing is None:
            self.kernel(inputs, meter, course)
            self._leave_no_pages(inputs)
            return
        try:
            assert isinstance(self.kernel, FusedKernel)
            if not self.kernel.is_skipped(inputs):
                self._in_pieces(self.kernel, inputs, meter, course, passing)
            passing.finish()
        finally:
            passing.close()

    def _leave_no_pages(self, inputs: Sequence[Any]) -> None:
        for place in self.places:
            if (file := file_of(inputs[place])) is not None:
                file.leave_no_pages(0, file.nbytes, written=True)

    def _in_pieces(
        self,
        kernel: FusedKernel,
        inputs: Sequence[Any],
        meter: MemoryMeter,
        course: Course,
        passing: Passing,
    ) -> None:
        tensors, source, small, settings = kernel.begin(inputs, meter)
        source = source.contiguous().view(-1)
        gradient_at = len(self.places) - 1 if self.gradient_rests else None
        rows = {name: t.view(-1) if t.dim() else t for name, t in tensors.items()}
        names = {place: name for name, place in kernel.positions.items()}
        resting = [names[place] for place in self.places[:gradient_at]]
        for part, here, gradient in self._parts(course, passing, rows, resting):
            own = source[here] if gradient is None else gradient
            # Ops on the gradient run in parts that stay in the cache, as without a disk.
            count = cache_rows(own) if kernel.gradient.ops else own.numel()
            for few, of_source in in_pieces(part, own, count):
                kernel.update_piece(few, of_source, small, settings, meter)

    def _parts(
        self,
        course: Course,
        passing: Passing,
        rows: Mapping[str, torch.Tensor],
        resting: Sequence[str],
    ) -> Iterator[tuple[Mapping[str, torch.Tensor], slice, torch.Tensor | None]]:
        """The elements of both a piece of the course and one in a room, and what has them.

        At last what a room has of the gradient, where that rests on disk. A tensor without rows (a
        step counter) is a copy in all but the last.
        """
        dtype, total = rows["param"].dtype, rows["param"].numel()
        each = PIECE_BYTES // dtype.itemsize
        along = course.piecewise
        step = total if along is None else along.rows * along.row_elements
        room: Room | None = None
        for number in course.pieces():
            start, end = number * step, min(total, (number + 1) * step)
            while start < end:
                piece = start // each
                first, size = piece * each, passing.size(piece)
                until = min(end, first + each)
                room = passing.take(piece) if room is None else room
                here, inside = slice(start, until), slice(start - first, until - first)
                part = {n: row[here] if row.dim() else row for n, row in rows.items()}
                part |= {
                    name: room.elements(place, size, dtype)[inside]
                    for place, name in enumerate(resting)
                }
                if until < total:
                    part |= {n: row.clone() for n, row in rows.items() if not row.dim()}
                gradient = None
                if self.gradient_rests:
                    gradient = room.elements(len(resting), size, dtype)[inside]
                yield part, here, gradient
                if until in (first + each, total):
                    passing.give_back(piece)
                    room = None
                start = until


def resting_kernels(
    placed: StepGraph, placement: Placement, kernels: Mapping[str, HostKernel]
) -> dict[str, RestingKernel]:
    """For each update of `placed` of what `placement` has on disk, by task, what runs it."""
    found: dict[str, RestingKernel] = {}
    for _, call in region_calls(placed.module.graph):
        names = [_input_name(placed, value) for value in call.inputs]
        places = [i for i, name in enumerate(names) if placement.homes.get(name) is Tier.DISK]
        kernel = kernels[call.launch.task]
        written = set(kernel.positions.values()) if isinstance(kernel, FusedKernel) else set()
        read = [place for place in places if written and place not in written]
        if places:
            ordered = [place for place in places if place not in read] + read
            found[call.launch.task] = RestingKernel(kernel, ordered, bool(read))
    late = any(kernel.gradient_rests for kernel in found.values())
    return {task: replace(kernel, late=late) for task, kernel in found.items()}


def _input_name(placed: StepGraph, value: object) -> str:
    """The input of the step that `value` is, "" where it is none."""
    item = placed.input_of_node.get(value.name) if isinstance(value, fx.Node) else None
    return "" if item is None else item.name

"""Fused kernel: a host region by one of ATen's fused loops, with what is before and behind it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from cotrain_compile.runtime.course import WHOLE, Course
from cotrain_compile.runtime.host.fused_loops import Update
from cotrain_compile.runtime.host.gradient_prologue import (
    GradientPart,
    cache_rows,
    in_pieces,
    is_one_piece,
)
from cotrain_compile.runtime.host.live_settings import with_settings
from cotrain_compile.runtime.meter import MemoryMeter, MeteredGraph


class HostKernel(Protocol):
    """Updates one parameter and its states in place, from host tensors, along a `course`."""

    def __call__(
        self, inputs: Sequence[Any], meter: MemoryMeter, course: Course = WHOLE, /
    ) -> None: ...


@dataclass(frozen=True)
class FusedKernel:
    """Runs what happens to the gradient before the optimizer, a fused loop, and what comes after.

    The loop, that of an `optimizer`, goes piece by piece, unless the gradient is ready as it is.
    `positions` says at which
    input the parameter ("param") and each state are; `settings` are the optimizer's, `live` those
    of them that are inputs (`lr`, `betas.0`, ...), with their positions; `skip` is the input that
    says whether the loop is left out, `after` the ops behind it, None where there are none.
    """

    gradient: GradientPart
    optimizer: type
    update: Update
    positions: Mapping[str, int]
    settings: Mapping[str, Any]
    live: Mapping[str, int]
    skip: int | None = None
    after: MeteredGraph | None = None

    def __call__(self, inputs: Sequence[Any], meter: MemoryMeter, course: Course = WHOLE) -> None:
        if not self.is_skipped(inputs):
            self._update(inputs, meter, course)
        if self.after is not None:
            self.after(inputs, meter)

    def is_skipped(self, inputs: Sequence[Any]) -> bool:
        """Whether this step leaves out the loop."""
        return self.skip is not None and bool(inputs[self.skip])

    def begin(
        self, inputs: Sequence[Any], meter: MemoryMeter
    ) -> tuple[Mapping[str, torch.Tensor], torch.Tensor, Sequence[Any], Mapping[str, Any]]:
        """What is updated, by name, where its gradient comes from, with what, and how."""
        source, *small = self.gradient.begin(inputs, meter)
        tensors = {name: inputs[position] for name, position in self.positions.items()}
        live = {name: float(inputs[position]) for name, position in self.live.items()}
        settings = with_settings(self.settings, live) if live else self.settings
        return tensors, source, small, settings

    def _update(self, inputs: Sequence[Any], meter: MemoryMeter, course: Course) -> None:
        tensors, source, small, settings = self.begin(inputs, meter)
        if course is WHOLE and is_one_piece(source):
            self.update_piece(tensors, source, small, settings, meter)
            return
        rows = course.piecewise.rows if course.piecewise is not None else _all_rows(source)
        parts = zip(course.pieces(), in_pieces(tensors, source, rows), strict=False)
        for _, (part, part_source) in parts:
            for piece, piece_source in self._pieces(part, part_source):
                self.update_piece(piece, piece_source, small, settings, meter)

    def update_piece(
        self,
        piece: Mapping[str, torch.Tensor],
        source: torch.Tensor,
        small: Sequence[Any],
        settings: Mapping[str, Any],
        meter: MemoryMeter,
    ) -> None:
        """Update what some of the tensors have of a piece, from the gradient's source there."""
        (gradient,) = self.gradient.finish((source, *small), meter)
        self.update([piece], [laid_out_as(piece["param"], gradient)], settings)

    def _pieces(
        self, tensors: Mapping[str, torch.Tensor], source: torch.Tensor
    ) -> Iterable[tuple[Mapping[str, torch.Tensor], torch.Tensor]]:
        is_ready = not self.gradient.ops and source.is_contiguous()
        in_order = all(tensor.is_contiguous() for tensor in tensors.values())
        rows = cache_rows(source) if in_order and not is_ready else _all_rows(source)
        return in_pieces(tensors, source, rows)


def _all_rows(source: torch.Tensor) -> int:
    return source.shape[0] if source.dim() else 1


def laid_out_as(param: torch.Tensor, gradient: torch.Tensor) -> torch.Tensor:
    """`gradient` with the strides of `param`: the loops go through memory in order."""
    if param.is_contiguous() or gradient.stride() == param.stride():
        return gradient.contiguous() if param.is_contiguous() else gradient
    return torch.empty_like(param).copy_(gradient)

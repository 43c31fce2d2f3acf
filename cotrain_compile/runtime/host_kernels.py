"""Host kernels: what runs a host region: ATen's fused optimizer loops where they match it.

A fused kernel is used only where it gives the captured ops' result on random data: what matches is
measured, not assumed. The captured ops themselves are the exact alternative.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import fx

from cotrain_compile.dataflow import Role
from cotrain_compile.graph import OptimizerRule, StepGraph, StepInput
from cotrain_compile.machine import Tier
from cotrain_compile.runtime.course import WHOLE, Course
from cotrain_compile.runtime.fused_loops import FUSED_LOOPS, Update
from cotrain_compile.runtime.gradient_part import (
    GradientPart,
    cache_rows,
    gradient_part,
    in_pieces,
)
from cotrain_compile.runtime.live_settings import live_settings, value_of, with_settings
from cotrain_compile.runtime.meter import Meter
from cotrain_compile.runtime.metered import MeteredGraph
from cotrain_compile.runtime.ops import host_region
from cotrain_compile.runtime.skipped_updates import skip_input

# Largest difference allowed between a fused kernel and the captured ops, relative to the largest
# change the update makes: torch's compiled optimizers take bias corrections in float32, the fused
# kernels in float64.
TOLERANCE = 1e-3


class HostKernel(Protocol):
    """Updates one parameter and its states in place, from host tensors, along a `course`."""

    def __call__(self, inputs: Sequence[Any], meter: Meter, course: Course = WHOLE, /) -> None: ...


@dataclass(frozen=True)
class CapturedKernel:
    """Runs the captured ops one by one."""

    ops: MeteredGraph

    def __call__(self, inputs: Sequence[Any], meter: Meter, course: Course = WHOLE) -> None:
        for _ in course.pieces():
            self.ops(inputs, meter)


@dataclass(frozen=True)
class FusedKernel:
    """Runs what happens to the gradient before the optimizer, then a fused loop of ATen's.

    It goes piece by piece, unless the gradient is ready as it is. `positions` says at which input
    the parameter ("param") and each state are; `settings` are the optimizer's, `live` those of them
    that are inputs (`lr`, `betas.0`, ...), with their positions; `skip` is the input that says
    whether all stays as it is, None where there is none.
    """

    gradient: GradientPart
    update: Update
    positions: Mapping[str, int]
    settings: Mapping[str, Any]
    live: Mapping[str, int]
    skip: int | None = None

    def __call__(self, inputs: Sequence[Any], meter: Meter, course: Course = WHOLE) -> None:
        if self.skip is not None and bool(inputs[self.skip]):
            return
        source, *small = self.gradient.begin(inputs, meter)
        tensors = {name: inputs[position] for name, position in self.positions.items()}
        live = {name: float(inputs[position]) for name, position in self.live.items()}
        settings = with_settings(self.settings, live)
        rows = course.cut.rows if course.cut is not None else _all_rows(source)
        cut = zip(course.pieces(), in_pieces(tensors, source, rows), strict=False)
        for _, (part, part_source) in cut:
            for piece, piece_source in self._pieces(part, part_source):
                (gradient,) = self.gradient.finish((piece_source, *small), meter)
                # The loops go through memory in order, whatever the strides say.
                in_order = gradient.contiguous() if piece["param"].is_contiguous() else gradient
                self.update(piece, in_order, settings)

    def _pieces(
        self, tensors: Mapping[str, torch.Tensor], source: torch.Tensor
    ) -> Iterable[tuple[Mapping[str, torch.Tensor], torch.Tensor]]:
        is_ready = not self.gradient.ops and source.is_contiguous()
        in_order = all(tensor.is_contiguous() for tensor in tensors.values())
        rows = cache_rows(source) if in_order and not is_ready else _all_rows(source)
        return in_pieces(tensors, source, rows)


def _all_rows(source: torch.Tensor) -> int:
    return source.shape[0] if source.dim() else 1


def host_kernels(placed: StepGraph, choice: str) -> dict[str, HostKernel]:
    """A kernel for every host region of `placed`, by task name.

    `choice` is "fused" (where it matches) or "captured".
    """
    kernels: dict[str, HostKernel] = {}
    trusted: dict[object, bool] = {}
    for call in _smallest_first(placed):
        name = str(call.args[0].target)  # type: ignore[union-attr]
        region = placed.module.get_submodule(name)
        assert isinstance(region, fx.GraphModule)
        captured = CapturedKernel(MeteredGraph(region, Tier.HOST))
        inputs = _described_inputs(region, placed)
        fused = _fused(region, inputs, placed.rules) if choice == "fused" else None
        if fused is not None:
            kind = _kind(region, inputs, placed.rules)
            if kind not in trusted:
                trusted[kind] = _agree(fused, captured, region)
            fused = fused if trusted[kind] else None
        kernels[str(call.args[1])] = fused or captured
    return kernels


def _smallest_first(placed: StepGraph) -> list[fx.Node]:
    """Region calls by size: the comparison of a kind then runs on its smallest parameter."""
    calls = placed.module.graph.find_nodes(op="call_function", target=host_region)

    def size(call: fx.Node) -> int:
        values = [n.meta.get("val") for n in call.all_input_nodes]
        return sum(int(v.numel()) for v in values if isinstance(v, torch.Tensor))

    return sorted(calls, key=size)


def _described_inputs(region: fx.GraphModule, placed: StepGraph) -> list[StepInput | None]:
    """For each input of the region the step input it is, None for what the step computed."""
    names = [node.name for node in region.graph.find_nodes(op="placeholder")]
    return [placed.input_of_node.get(name) for name in names]


def _rule(inputs: Sequence[StepInput | None], rules: Mapping[str, OptimizerRule]) -> Any:
    param = next((i.name for i in inputs if i is not None and i.role is Role.PARAM), "")
    return rules.get(param)


def _fused(
    region: fx.GraphModule,
    inputs: Sequence[StepInput | None],
    rules: Mapping[str, OptimizerRule],
) -> FusedKernel | None:
    """A fused kernel for the region, None where there is none for its optimizer or its shape."""
    rule = _rule(inputs, rules)
    maker = FUSED_LOOPS.get(rule.optimizer) if rule is not None else None
    gradient = gradient_part(region, inputs)
    if maker is None or gradient is None:
        return None
    if any(isinstance(value, torch.Tensor) for value in rule.settings.values()):
        return None
    positions = {
        "param" if item.role is Role.PARAM else item.name.removeprefix(f"{item.param}."): position
        for position, item in enumerate(inputs)
        if item is not None and item.role in (Role.PARAM, Role.OPTIMIZER_STATE)
    }
    live = live_settings(inputs, rule.settings)
    update = maker(rule.settings, frozenset(positions))
    if update is None or live is None:
        return None
    return FusedKernel(gradient, update, positions, rule.settings, live, skip_input(region))


def _kind(
    region: fx.GraphModule,
    inputs: Sequence[StepInput | None],
    rules: Mapping[str, OptimizerRule],
) -> object:
    """Regions of one kind run the same ops with the same settings."""
    rule = _rule(inputs, rules)
    ops = tuple(str(node.target) for node in region.graph.nodes if node.op == "call_function")
    values = [node.meta.get("val") for node in region.graph.find_nodes(op="placeholder")]
    layouts = tuple(_layout(value) if isinstance(value, torch.Tensor) else None for value in values)
    return ops, layouts, rule.optimizer, str(sorted(rule.settings.items()))


def _layout(value: torch.Tensor) -> object:
    """Equal for tensors that a loop goes through alike: of any size where they are contiguous."""
    if value.is_contiguous():
        return str(value.dtype)
    return str(value.dtype), tuple(map(int, value.shape)), tuple(map(int, value.stride()))


def _agree(fused: FusedKernel, captured: CapturedKernel, region: fx.GraphModule) -> bool:
    """Whether both kernels turn the same random inputs into the same parameter and states."""
    inputs = [_sample(node) for node in region.graph.find_nodes(op="placeholder")]
    for name, position in fused.live.items():
        # Of the size it has, and not as it was when the step was traced.
        inputs[position] = torch.tensor(0.7 * value_of(fused.settings, name), dtype=torch.float64)
    if fused.skip is None:
        return _agree_on(inputs, fused, captured)
    skipped, taken = list(inputs), list(inputs)
    skipped[fused.skip], taken[fused.skip] = torch.tensor(True), torch.tensor(False)
    return all(_agree_on(values, fused, captured) for values in (skipped, taken))


def _agree_on(before: Sequence[Any], fused: FusedKernel, captured: CapturedKernel) -> bool:
    meter = Meter(dict.fromkeys(Tier, 1 << 62))
    results = []
    for kernel in (captured, fused):
        inputs = [_copied(v) if isinstance(v, torch.Tensor) else v for v in before]
        with torch.no_grad(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                kernel(inputs, meter)
            except RuntimeError:
                if kernel is captured:
                    raise
                return False  # ATen's loop refuses such tensors, as states in another precision
        results.append(inputs)
    return all(
        _close(old, exact, fast)
        for old, exact, fast in zip(before, *results, strict=True)
        if isinstance(old, torch.Tensor)
    )


def _sample(node: fx.Node) -> Any:
    value = node.meta.get("val")
    if not isinstance(value, torch.Tensor):
        return 0.01
    shape = [int(size) for size in value.shape]
    generator = torch.Generator().manual_seed(0)
    # Small enough that the epsilon of a denominator shows; positive, as second moments are.
    sample = torch.rand(shape, generator=generator, dtype=torch.float64) * 1e-7 + 1e-9
    if not shape:
        sample = sample * 0 + 7.0  # a step count or a coefficient
    strides = [int(stride) for stride in value.stride()]
    return torch.empty_strided(shape, strides, dtype=value.dtype).copy_(sample)


def _copied(value: torch.Tensor) -> torch.Tensor:
    """With the strides of `value`, which `clone` does not keep where they leave gaps."""
    return torch.empty_strided(value.size(), value.stride(), dtype=value.dtype).copy_(value)


def _close(old: torch.Tensor, exact: torch.Tensor, fast: torch.Tensor) -> bool:
    if not old.numel():
        return True
    change = (exact.double() - old.double()).abs().max()
    difference = (exact.double() - fast.double()).abs().max()
    rounding = exact.double().abs().max() * torch.finfo(torch.float32).eps * 4
    return bool(difference <= TOLERANCE * change + rounding)

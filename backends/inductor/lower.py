"""Lower: a placed step becomes segments with compiled code, every kind of segment compiled once.

A placed StepGraph and the dataflow of its sizes in, a `LoweredStep` out.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatch
from typing import Any

import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from cotrain_compile.analysis.layers import layers_of
from cotrain_compile.backends.inductor.compile_graph import (
    CUDA_GRAPHS,
    Code,
    compile_graph,
    draws_other_numbers,
    may_draw_out_of_order,
    unknown_settings,
)
from cotrain_compile.backends.inductor.partition import partition, sink_into_updates
from cotrain_compile.backends.inductor.segments import Segment, SegmentedStep, segmented
from cotrain_compile.dataflow import Dataflow
from cotrain_compile.errors import LoweringError, OptionError
from cotrain_compile.graph import StepGraph
from cotrain_compile.passes.views import ADD_IN_PLACE, COPY, GIVEN, viewed, written_by
from cotrain_compile.support.collector import collector_off
from cotrain_compile.support.phases import tell_phase
from cotrain_compile.support.raised_by_handler import raised_by_handler

Settings = Mapping[str, Any]


@dataclass(frozen=True, eq=False)
class LoweredStep:
    """A segmented step with the `code` of each segment by name; equal segments share theirs."""

    segmented: SegmentedStep
    code: Mapping[str, Code]

    @property
    def kinds(self) -> int:
        """How many segments were compiled: the different ones."""
        return len({id(code) for code in self.code.values()})


def lower(
    step: StepGraph,
    placed: StepGraph,
    dataflow: Dataflow,
    settings: Settings,
    eager_segments: tuple[str, ...],
    apart: Collection[str] = (),
) -> LoweredStep:
    """Compile `placed`, which passes made of `step`, with Inductor.

    `dataflow` is that of `step` for the sizes to compile for; `settings` are Inductor's; segments
    whose name matches one of `eager_segments` keep their ops, and the ops called as in `apart` are
    in no segment. Raises `LoweringError` where Inductor fails.
    """
    _refuse_settings(settings)
    whole = segments_of(step, placed, dataflow, eager_segments, apart)
    return LoweredStep(whole, _compile_each_kind(whole.segments, settings))


@collector_off()
def segments_of(
    step: StepGraph,
    placed: StepGraph,
    dataflow: Dataflow,
    eager_segments: tuple[str, ...] = (),
    apart: Collection[str] = (),
) -> SegmentedStep:
    """As `lower`, without compiling."""
    placed = placed.copy()
    sink_into_updates(placed.module.graph, dataflow)
    symbols = frozenset(dataflow.symbols)

    def alone(node: fx.Node) -> bool:
        return node.name in apart or _runs_alone(node, symbols)

    stretches = partition(placed.module.graph, layers_of(dataflow), alone)
    _refuse_unmatched(eager_segments, [stretch.name for stretch in stretches])
    compiled = [s for s in stretches if not any(fnmatch(s.name, p) for p in eager_segments)]
    # All sizes are numbers, but without an environment for shapes Inductor leaves its cache alone.
    mode = FakeTensorMode(allow_non_fake_inputs=True, shape_env=ShapeEnv(), static_shapes=True)
    return segmented(placed, compiled, dataflow.symbols, mode)


def _compile_each_kind(segments: Mapping[str, Segment], settings: Settings) -> dict[str, Code]:
    kinds: dict[str, list[str]] = {}
    for name, segment in segments.items():
        kinds.setdefault(segment.key, []).append(name)
    code: dict[str, Code] = {}
    for number, names in enumerate(kinds.values(), 1):
        tell_phase(f"compiling: {number}/{len(kinds)}")
        compiled = _compile([segments[name] for name in names], settings)
        code |= dict.fromkeys(names, compiled)
    return code


def _compile(equal: Sequence[Segment], settings: Settings) -> Code:
    """The code of `equal` segments."""
    segment = equal[0]
    try:
        return compile_graph(segment.module, segment.inputs, settings, segment.strides)
    except Exception as error:
        if (own := raised_by_handler(error)) is not None:
            raise own from None
        reason = str(error).strip().splitlines() or [type(error).__name__]
        names = [other.name for other in equal]
        where = f", which comes from\n{segment.stack_trace}" if segment.stack_trace else ""
        raise LoweringError(
            f"Inductor cannot compile segment {segment.name!r} ({segment.ops[0]} to "
            f"{segment.ops[-1]}): {reason[0]}. Run it in eager with "
            f'options={{"eager_segments": {names}}}; if its cache is damaged, delete the folder '
            f"that TORCHINDUCTOR_CACHE_DIR names{where}",
            segment=segment.name,
        ) from error


def _collects(node: fx.Node) -> bool:
    """Whether `node` adds to what is there, or writes a part of it."""
    if node.target is ADD_IN_PLACE:
        return True
    return node.target is COPY and viewed(written_by(node)) is not None


def _runs_alone(node: fx.Node, symbols: frozenset[str]) -> bool:
    """Whether an op can be in no segment: it takes a subgraph, or takes or makes a number.

    A segment is compiled for the sizes of `symbols`, and a number that is none may be another in
    the next call. Or the op would draw other random numbers, or before or behind others.
    """
    if (
        draws_other_numbers(node)
        or may_draw_out_of_order(node)
        or GIVEN in node.meta
        or _collects(node)
    ):
        return True
    given = [source.meta.get("val") for source in node.all_input_nodes]
    if any(value is None for value in given):
        return True
    numbers = (*given, node.meta.get("val"))
    return any(isinstance(v, torch.SymFloat | float) for v in numbers) or any(
        isinstance(v, torch.SymInt) and not _symbols_of(v) <= symbols for v in given
    )


def _symbols_of(number: torch.SymInt) -> set[str]:
    expression = number.node.shape_env.simplify(number.node.expr)
    return {str(symbol) for symbol in expression.free_symbols}


def _refuse_settings(settings: Settings) -> None:
    for name in unknown_settings(settings):
        raise OptionError(f"option 'inductor' has {name!r}, which torch._inductor.config has not")
    if settings.get(CUDA_GRAPHS):
        raise OptionError(
            f"option 'inductor' sets {CUDA_GRAPHS!r}: a CUDA graph needs its tensors at addresses "
            "that stay, but a plan moves them, and it keeps memory that no plan counts; leave the "
            "setting out"
        )


def _refuse_unmatched(patterns: tuple[str, ...], names: list[str]) -> None:
    for pattern in patterns:
        if not any(fnmatch(name, pattern) for name in names):
            known = ", ".join(names[:8]) + (", ..." if len(names) > 8 else "")
            raise OptionError(f"option 'eager_segments' has {pattern!r}; segments are {known}")

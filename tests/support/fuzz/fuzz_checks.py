"""What holds of a random program besides its numbers: graph, budgets, compiles and refusals.

Each raises `Broken` where it does not.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor
from torch._dynamo.utils import counters

from cotrain_compile.backends.lifecycle.compiled_step import CompiledStep
from cotrain_compile.errors import (
    CaptureError,
    CotrainError,
    OutOfDeviceMemory,
    PlacementError,
    PlanError,
)
from cotrain_compile.graph import StepGraph, returns_argument_memory
from cotrain_compile.machine import Tier
from cotrain_compile.passes.views import storage
from cotrain_compile.placement.search.found import UNSOUND
from tests.support.closeness import same_bits
from tests.support.fuzz.fuzz_compare import Broken
from tests.support.fuzz.fuzz_specs import Spec


def require_sound_plans() -> None:
    """`Broken` where the search has found a plan that the check refused, whatever it returned."""
    unsound = [*UNSOUND]
    UNSOUND.clear()
    if unsound:
        raise Broken(f"an unsound plan was found and dropped: {unsound[0]}")


def check_views(step: StepGraph) -> None:
    """What shows the memory of a value in the run shows it in the trace, too."""
    for node in step.nodes:
        if returns_argument_memory(node) and storage(node) != storage(node.all_input_nodes[0]):
            raise Broken(f"{node} does not show the memory of its argument in the trace")


def check_meter(compiled: CompiledStep, *, is_exact: bool) -> None:
    """No tier held more than its budget, nor the device more than in the dry run.

    Nor the host more than was predicted.

    `is_exact`: it held just what was predicted.
    """
    measured, plan, dry_run_bytes = compiled.measured, compiled.plan, compiled.dry_run_device_bytes
    assert measured is not None
    assert dry_run_bytes is not None
    for tier, budget in plan.budgets.items():
        used = measured.peak_bytes.get(tier, 0)  # nothing of a disk, where none is needed
        if used > budget:
            raise Broken(f"{used} bytes on {tier}, {budget} allowed")
    found, planned = (t.peak_bytes[Tier.HOST] for t in (measured, compiled.predicted))
    if found > planned:
        raise Broken(f"{found} bytes on the host, at most {planned} predicted")
    found, planned = (t.peak_bytes[Tier.DEVICE] for t in (measured, compiled.predicted))
    if found > dry_run_bytes:
        raise Broken(f"{found} bytes on the device, {dry_run_bytes} in the dry run")
    if is_exact and found != planned:
        raise Broken(f"{found} bytes on the device, {planned} predicted")


def check_compiles(spec: Spec) -> None:
    found, allowed = counters["stats"]["unique_graphs"], allowed_graphs(spec)
    if found > allowed:
        raise Broken(f"compiled {found} graphs, at most {allowed} are documented")


def allowed_graphs(spec: Spec) -> int:
    """One graph for each kind of size; one more for new rates, and for gradients that are there.

    The first size is traced as it is and all others of two rows and more share a graph, but torch
    specialises a dimension of 1: a micro-batch of one row has a graph of its own.
    """
    micro_rows = {rows // spec.loop.micro_batches for rows in spec.loop.rows}
    by_size = min(2, len(micro_rows - {1})) + (1 in micro_rows)
    has_grads = spec.loop.clear == "zeros" or bool(spec.options.get("keep_grads"))
    return by_size + bool(spec.loop.rates) + has_grads + spec.loop.masters


def check_nothing_changed(
    before: Mapping[str, Tensor], after: Mapping[str, Tensor], error: Exception
) -> None:
    for name, value in before.items():
        if not same_bits(value, after[name]):
            raise Broken(f"{name} changed in a step that was refused: {error}") from error


def checked_refusal(error: CotrainError, options: Mapping[str, Any]) -> str:
    """The message of a refusal; `Broken` where it is one that nothing in a program explains."""
    if isinstance(error, PlanError) and is_late(error, options):
        return f"{type(error).__name__}: {error}"
    if isinstance(error, OutOfDeviceMemory) and has_no_smaller_plan(error):
        return f"{type(error).__name__}: {error}"
    if not isinstance(error, CaptureError | PlacementError):
        raise Broken(f"refused by {type(error).__name__}: {error}") from error
    if isinstance(error, PlacementError) and error.shortfall_bytes <= 0:
        raise Broken(f"a refusal that lacks nothing: {error}") from error
    return f"{type(error).__name__}: {error}"


def is_late(error: PlanError, options: Mapping[str, Any]) -> bool:
    """Whether the program alone was asked for, and said that its time was too short for it.

    Where its solver has answered in every round, it tries simpler ways and never says so.
    """
    return options.get("policy") in (
        "ilp",
        "lp-round",
    ) and "found no plan within its limit" in str(error)


def has_no_smaller_plan(error: OutOfDeviceMemory) -> bool:
    """Whether less was tried after a dry run, does not fit, and the error says the way on."""
    told = " ".join((str(error), *getattr(error, "__notes__", ())))
    return all(words in told for words in ("Less does not fit", "Raise memory_budget by"))

"""Scalars: what a compiled step was predicted to take and took, as numbers to write into a log.

In: a step that has run. Out: a plain dictionary, for TensorBoard, W&B or any other tracker.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from cotrain_compile.backends.lifecycle.compiled_step import CompiledStep
from cotrain_compile.entry.compiled import inspect


def scalars(
    step: Callable[..., Any] | CompiledStep, tokens: float | None = None, prefix: str = ""
) -> dict[str, float]:
    """Seconds, bytes and counts of a compiled step, by name; with `tokens` a step their rates too.

    Seconds and peaks are predicted and, once the step has run, measured in its last run. There is
    no `mfu` where the machine's rates are too low for it (`Throughput.why_no_mfu`). Raises
    `CotrainError` as `inspect` does, ValueError where `tokens` is not above 0.
    """
    compiled = step if isinstance(step, CompiledStep) else inspect(step)
    found = _of_plan(compiled)
    if compiled.last_step_s is not None:
        found["measured_s"] = compiled.last_step_s
        for tier, nbytes in compiled.peak_bytes.items():
            found[f"{tier.value}_peak_bytes"] = nbytes
    if (guesses := compiled.guesses) is not None:
        found |= {"wrong_guesses_share": guesses.wrong_share, "guesses": float(guesses.is_open)}
    if tokens is not None:
        rates = compiled.throughput(tokens)
        found["tokens_per_s"] = rates.tokens_per_s
        if rates.mfu is not None:
            found["mfu"] = rates.mfu
    return {f"{prefix}{name}": value for name, value in found.items()}


def _of_plan(compiled: CompiledStep) -> dict[str, float]:
    plan, dataflow = compiled.plan, compiled.problem.dataflow
    again = [name for name in plan.placement.recomputed if name in dataflow.buffer]
    found: dict[str, float] = {
        "predicted_s": plan.predicted.makespan_s,
        "offloaded_bytes": plan.bytes_moved("offload"),
        "prefetched_bytes": plan.bytes_moved("prefetch"),
        "recomputed_bytes": sum(dataflow.buffer[name].nbytes for name in again),
        "host_updates": len(plan.host_updates),
        "steps": compiled.steps,
    }
    for tier in plan.tiers:
        found[f"{tier.value}_predicted_peak_bytes"] = plan.predicted.peak_bytes[tier]
        found[f"{tier.value}_budget_bytes"] = plan.budgets[tier]
    return found

"""Composed rows: the fastest layout of each kind, as a `RankedStrategy` with its name.

In: a `Question` and a kind of layouts. Out: a row named by the layout, `pipeline 2 x shard 8`, with
the `Layout` that runs it, and the stages of its pipeline; or an error that says why there is none.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from cotrain_compile.cluster.answer.judges import (
    a_strategy,
    launch,
    micro_batches_in_words,
    on_hosts,
)
from cotrain_compile.cluster.composed.mesh import ORDER
from cotrain_compile.cluster.composed.search import ComposedPlan, plan_composed
from cotrain_compile.cluster.model.layout import Layout
from cotrain_compile.cluster.model.stage_plan import StagePlan
from cotrain_compile.cluster.model.strategy import Question, RankedStrategy
from cotrain_compile.cluster.pipeline.pipeline import PipelinePlan


def judge_composed(question: Question, name: str) -> RankedStrategy:
    """The fastest of all layouts of the kind `name`."""
    plan = plan_composed(question.profile, question.cluster, question.samples, name)
    layout = plan.layout
    found = a_strategy(
        question,
        str(layout),
        plan.step,
        plan.traffic(),
        plan.peak_bytes,
        question.cluster.capacities_bytes[: layout.devices],
        "; ".join(_setting(plan)),
        _run(question, layout),
    )
    return replace(found, layout=layout, stages=_stages(plan), host_bytes=plan.host_bytes)


def _run(question: Question, layout: Layout) -> str:
    """How to run it, or that nothing here does."""
    if layout.not_executed:
        return f"planned and not executed: {layout.not_executed}"
    started = launch(question.cluster, layout.devices)
    how = f'the model and the answer that -o saves in cotrain_compile.scale, strategy="{layout}"'
    return f"{started}: {how}"


def _setting(plan: ComposedPlan) -> Iterator[str]:
    layout, inner = plan.layout, plan.plan
    batches = micro_batches_in_words(layout.micro_batches, layout.micro_batch, layout.recompute)
    if layout.shard > 1:
        again = "again" if layout.gathered_again else "once"
        each = " in each" if layout.micro_batches > 1 and layout.pipeline == 1 else ""
        batches += f", parameters gathered {again}{each}"
    yield batches
    if layout.tensor > 1:
        tokens = ", all else by tokens" if layout.sequence else ""
        yield f"products and attention in {layout.tensor} parts{tokens}"
    if layout.experts > 1:
        yield f"experts in {layout.experts} parts"
    if isinstance(inner, PipelinePlan):
        hosts = on_hosts(inner.residence)
    else:
        hosts = inner.replicas.residence.in_words(len(inner.replicas.units))
        hosts += "; one unit at a time, nothing ahead" if inner.replicas.ahead == 1 else ""
    if hosts:
        yield hosts
    if isinstance(inner, PipelinePlan):
        yield f"stages begin at {', '.join(inner.cut.split_points)}"


def _stages(plan: ComposedPlan) -> StagePlan | None:
    inner = plan.plan
    if not isinstance(inner, PipelinePlan):
        return None
    return StagePlan(
        ORDER.value,
        inner.cut.split_points,
        inner.micro_batches,
        inner.micro_batch,
        inner.cut.peak_bytes,
    )

"""Strategies: one answer for a model on a cluster, all ways to train it in the order of their time.

In: a `LayerProfile`, a `Cluster`, the samples of a step. Out: an `Answer`: of every strategy that
was asked for a `RankedStrategy`, those that fit first, the fastest in front. One that cannot be
judged is in it with the reason. Nothing is run. No torch.

`memory_of` is what a model takes of a cluster's memory at least, whatever the strategy. Parameters,
gradients and optimizer states rest somewhere, each once: an update waits for all gradients, as one
that clips them does, and micro-batches add them up in their parameter's type. Beside them a device
works on a layer, with one sample, and runs it again for its backward.

Composed rows: the fastest layout of each kind, as a `RankedStrategy` with its name.

In: a `Question` and a kind of layouts. Out: a row named by the layout, `pipeline 2 x shard 8`, with
the `Layout` that runs it, and the stages of its pipeline; or an error that says why there is none.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

from cotrain_compile.cluster.answer import judges
from cotrain_compile.cluster.answer.judges import (
    a_strategy,
    launch,
    micro_batches_in_words,
    on_hosts,
)
from cotrain_compile.cluster.composed.mesh import ORDER
from cotrain_compile.cluster.composed.search import KINDS, ComposedPlan, plan_composed
from cotrain_compile.cluster.model.description import Cluster, fastest_first, first_devices
from cotrain_compile.cluster.model.layout import Layout, StagePlan
from cotrain_compile.cluster.model.machines import machines_by_kind
from cotrain_compile.cluster.model.profiles import Layer, LayerProfile
from cotrain_compile.cluster.model.strategy import Answer, Memory, Question, RankedStrategy
from cotrain_compile.cluster.pipeline.pipeline import PipelinePlan
from cotrain_compile.errors import OptionError, PlacementError, did_you_mean
from cotrain_compile.support.units import format_bytes


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
        plan.exchanging,
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


_BY_TENSOR = (
    "that is by whole layers: --rank-plan says of a traced step whether tensor by tensor fits"
)
_RESTS = "parameters, gradients and optimizer states"


def memory_of(question: Question) -> Memory:
    """What the model takes at least, what devices and their hosts have, and whether that is less.

    What a layer takes at work counts as nothing where its peak is not known.
    """
    layers, cluster = question.profile.layers, question.cluster
    worked = [group for group in cluster.groups if group.devices]
    largest = max(layers, key=_at_work_bytes)
    found = Memory(
        parameters_bytes=sum(layer.param_bytes + layer.buffer_bytes for layer in layers),
        gradients_bytes=sum(layer.grad_bytes for layer in layers),
        states_bytes=sum(layer.state_bytes for layer in layers),
        working_bytes=round(max(map(_beside_bytes, layers))),
        devices_bytes=sum(cluster.capacities_bytes),
        hosts_bytes=sum(group.count * group.host.capacity_bytes for group in worked),
        largest_layer_bytes=round(_at_work_bytes(largest)),
        largest_device_bytes=max(cluster.capacities_bytes),
    )
    return found.saying(question.profile.name, cluster.name, largest.name)


def parts_missing(question: Question, name: str) -> str:
    """What the parts in which strategy `name` has the model are short of, at rest alone; "" where
    they are not, or it has it in no such parts.

    A rank whose parts are not may be planned tensor by tensor (`rank_plan`).
    """
    if name in ("replicate", "byteps", "shard"):
        return _of_ranks(question, name)
    if name.startswith("pipeline"):
        return _of_stages(question)
    return ""


def _of_ranks(question: Question, name: str) -> str:
    """Equal parts, or copies, on so many devices as leave least missing."""
    cluster, rests = question.cluster, question.profile.resting_bytes
    counts = [n for n in range(1, len(cluster.devices) + 1) if question.samples % n == 0]
    found = []
    for count in counts:
        part = first_devices(cluster, count)
        machines = machines_by_kind(part)
        rooms = zip(part.capacities_bytes, part.kinds, strict=True)
        room = min(capacity + machines[kind].host.capacity_bytes for capacity, kind in rooms)
        own = -(-rests // count) if name == "shard" else rests
        found.append((own - room, count, own, room))
    missing, count, own, room = min(found)
    if missing <= 0:
        return "" if name == "byteps" else _BY_TENSOR
    what = f"one of {count} equal parts of" if name == "shard" and count > 1 else "a copy of"
    return (
        f"{what} {_RESTS} is {format_bytes(own)}, and the smallest device with its share of the "
        f"host has {format_bytes(room)}"
    )


def _of_stages(question: Question) -> str:
    """Stages hold parameters and gradients on their devices, and buffers."""
    layers = question.profile.layers
    held = sum(layer.param_bytes + layer.buffer_bytes + layer.grad_bytes for layer in layers)
    room = sum(question.cluster.capacities_bytes)
    if held <= room:
        return ""
    return (
        "stages hold parameters and gradients on their devices, which is "
        f"{format_bytes(held)}, and all devices have {format_bytes(room)}"
    )


def _at_work_bytes(layer: Layer) -> float:
    """Of one sample; 0 where nobody knows."""
    return layer.backward_peak(1) if layer.backward_peak_bytes else 0.0


def _beside_bytes(layer: Layer) -> float:
    """What both passes take beside parameters, buffers and gradients."""
    held = layer.param_bytes + layer.buffer_bytes
    forward = layer.forward_peak(1) if layer.forward_peak_bytes else 0.0
    return max(0.0, forward - held, _at_work_bytes(layer) - held - layer.grad_bytes)


_JUDGES: dict[str, Callable[[Question, str], RankedStrategy]] = {
    "replicate": judges.judge_replicate,
    "shard": judges.judge_shard,
    "pipeline-gpipe": judges.judge_pipeline,
    "pipeline-1f1b": judges.judge_pipeline,
    "harmony-dp": judges.judge_harmony_dp,
    "harmony-pp": judges.judge_harmony_pp,
    "burst": judges.judge_burst,
    "byteps": judges.judge_byteps,
    **dict.fromkeys(KINDS, judge_composed),
}
STRATEGIES = tuple(_JUDGES)

AS_FAST = (
    "Devices of all kinds are taken to compute as fast as the one that the profile is of; a traced "
    "step knows better."
)
HOSTS = (
    "A rank has an equal share of its host: of memory, of the way to it, and of its updates, which "
    "are slowed down as if copies went on beside them. Widths use no host."
)
AGAIN = (
    "What layers keep was not measured, so that they run again for the backward where peaks count."
)


def answer(
    profile: LayerProfile,
    cluster: Cluster,
    samples: int,
    strategies: Sequence[str] = STRATEGIES,
) -> Answer:
    """All `strategies` for steps of so many samples, ranked.

    Raises:
        OptionError: there are no samples or no strategies, or one has a name that none has.
    """
    unknown = [name for name in strategies if name not in _JUDGES]
    if unknown or not strategies:
        raise OptionError(
            f"strategies {', '.join(unknown) or 'none'}"
            f"{did_you_mean(unknown[0], STRATEGIES) if unknown else ''}: known are "
            f"{', '.join(STRATEGIES)}"
        )
    if samples < 1:
        raise OptionError(f"a step has at least one sample, not {samples}")
    question = Question(profile, fastest_first(cluster), samples)
    judged = [_judged(question, name) for name in dict.fromkeys(strategies)]
    ranked = sorted(judged, key=_rank)
    best = ranked[0]
    told = tuple(one if one is best else replace(one, loses=_why(one, best)) for one in ranked)
    assumed = [*profile.assumed, HOSTS]
    if question.cluster != cluster:
        names = ", ".join(group.name for group in question.cluster.groups if group.devices)
        within = [group.devices for group in cluster.groups]
        moved = any(group.devices not in within for group in question.cluster.groups)
        also = ", within a machine from its fastest device on" if moved else ""
        assumed.append(f"Ranks are counted from the fastest group of machines on: {names}{also}.")
    if len(set(cluster.kinds) - profile.slowness.keys()) > 1:
        assumed.append(AS_FAST)
    if any(layer.backward_peak_bytes and not layer.kept_bytes for layer in profile.layers):
        assumed.append(AGAIN)
    if any(one.step_s is not None and one.timeline is None for one in told):
        assumed.append(f"Steps of more than {judges.MOST_DRAWN:,} tasks have no timeline.")
    memory = memory_of(question)
    return Answer(profile.name, cluster.name, samples, told, tuple(assumed), memory)


def _judged(question: Question, name: str) -> RankedStrategy:
    try:
        found = _JUDGES[name](question, name)
    except PlacementError as error:
        found = RankedStrategy(name, fits=False, reason=str(error))
    except OptionError as error:
        return RankedStrategy(name, reason=str(error))
    if found.fits is False:
        reasons = (found.reason, parts_missing(question, name))
        found = replace(found, reason="; ".join(filter(None, reasons)))
    return found


def _rank(strategy: RankedStrategy) -> tuple[int, float]:
    """Those that can be run first; then what does not fit, then what cannot be judged."""
    if strategy.step_s is not None:
        return (1 if strategy.fits is False else 0), strategy.step_s
    return (2 if strategy.fits is False else 3), 0.0


def _why(strategy: RankedStrategy, best: RankedStrategy) -> str:
    """Why it is behind the best."""
    if strategy.step_s is None or strategy.fits is False:
        return strategy.reason
    assert best.step_s is not None  # the best is before one that has a time and fits
    more = strategy.more_than(best)
    return f"{strategy.step_s / best.step_s:.2f} times the best" + (f": {more}" if more else "")

"""Strategies: one answer for a model on a cluster, all ways to train it in the order of their time.

In: a `LayerProfile`, a `Cluster`, the samples of a step. Out: an `Answer`: of every strategy that
was asked for a `RankedStrategy`, those that fit first, the fastest in front. One that cannot be
judged is in it with the reason. Nothing is run. No torch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from cotrain_compile.cluster.answer import judges
from cotrain_compile.cluster.answer.memory_limit import memory_of, parts_missing
from cotrain_compile.cluster.model.description import Cluster, fastest_first
from cotrain_compile.cluster.model.profiles import LayerProfile
from cotrain_compile.cluster.model.strategy import Answer, Question, RankedStrategy
from cotrain_compile.errors import OptionError, PlacementError, did_you_mean
from cotrain_compile.support.units import format_seconds

_JUDGES: dict[str, Callable[[Question, str], RankedStrategy]] = {
    "replicate": judges.judge_replicate,
    "shard": judges.judge_shard,
    "pipeline-gpipe": judges.judge_pipeline,
    "pipeline-1f1b": judges.judge_pipeline,
    "harmony-dp": judges.judge_harmony_dp,
    "harmony-pp": judges.judge_harmony_pp,
    "burst": judges.judge_burst,
    "byteps": judges.judge_byteps,
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
        assumed.append(f"Ranks are counted from the fastest group of machines on: {names}.")
    if len(set(cluster.kinds) - profile.slowness.keys()) > 1:
        assumed.append(AS_FAST)
    if any(layer.backward_peak_bytes and not layer.kept_bytes for layer in profile.layers):
        assumed.append(AGAIN)
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
    return (
        f"{strategy.step_s / best.step_s:.2f} times the best: {strategy.busiest} is busy "
        f"{format_seconds(strategy.busiest_s)} of {format_seconds(strategy.step_s)}"
    )

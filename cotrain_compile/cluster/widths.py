"""Widths: on how many devices each layer runs, where the samples of a step are a fixed number.

In: a `WidthProblem`. Out: the widths with the least step time within the amplification limit, the
curve of step time against device-seconds as that rises, and what else may run on the devices that
are left (DeepPool; Park et al., MLSys 2022). No torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import inf

from cotrain_compile.cluster.width_problem import WidthProblem
from cotrain_compile.cluster.width_search import Path, Search, cost
from cotrain_compile.errors import OptionError
from cotrain_compile.units import format_seconds

# By how much a step may be slowed by what else runs on its devices, as DeepPool holds it.
ALLOWED_SLOWDOWN = 1.1


@dataclass(frozen=True)
class WidthPlan:
    """The width of each layer by name, which layers run on devices beside, and what that takes.

    `device_s` counts each layer on its devices, and each transfer on those of its wider side.
    """

    limit: float
    widths: Mapping[str, int]
    beside: tuple[str, ...]
    step_s: float
    device_s: float


@dataclass(frozen=True)
class BackgroundAdvice:
    """What other work may get of the devices of a step, and when it may be launched.

    `idle_device_s` is what the step leaves in its own time. While a step takes no more than
    `launch_while_step_below_s`, smoothed over some steps, and no gradients are being summed
    (`summing_s` of a step), other work may be launched: it gets at most `most_share` of all
    device-seconds.
    """

    idle_device_s: float
    summing_s: float
    launch_while_step_below_s: float
    most_share: float

    def __str__(self) -> str:
        return (
            f"launch other work on these devices only while a step, smoothed over some, takes less "
            f"than {format_seconds(self.launch_while_step_below_s)}, and not while gradients are "
            f"summed ({format_seconds(self.summing_s)} a step): it gets at most "
            f"{self.most_share:.0%} of the devices' time. MPS or streams of low priority do it"
        )


def plan_widths(problem: WidthProblem) -> WidthPlan:
    """The widths with the least step time within the limit; among equals few device-seconds."""
    ends = Search(problem).along(problem.items, {0: Path(0.0, 0.0)}, problem.devices, False)
    best = min(ends.values(), key=cost)
    widths, beside = {}, []
    for choice, is_beside in best.choices():
        widths[choice.layer] = choice.width
        if is_beside:
            beside.append(choice.layer)
    order = problem.profile.index
    return WidthPlan(
        problem.limit,
        {name: widths[name] for name in order},
        tuple(sorted(beside, key=order.__getitem__)),
        best.seconds,
        best.device_s,
    )


def data_parallel(problem: WidthProblem, width: int | None = None) -> WidthPlan:
    """Every layer on `width` devices, the most that there are where none is given."""
    width = width or problem.widths[-1]
    layers = problem.profile.layers
    seconds = sum(problem.layer_s(layer, width) for layer in layers)
    return WidthPlan(inf, {layer.name: width for layer in layers}, (), seconds, seconds * width)


def width_curve(problem: WidthProblem) -> tuple[WidthPlan, ...]:
    """What the devices buy: plans with ever more device-seconds and ever less step time.

    One for each limit at which something changes, the least first. A plan that takes no fewer
    device-seconds than one of a higher limit is left out, for that one is also as fast.
    """
    limits = {1.0, inf}
    for layer in problem.profile.layers:
        if problem.layer_s(layer, 1) > problem.least_limited_s:
            limits |= {max(1.0, problem.amplification(layer, w)) for w in problem.widths}
    curve: list[WidthPlan] = []
    for limit in sorted(limits):
        plan = plan_widths(replace(problem, limit=limit))
        while curve and curve[-1].device_s >= plan.device_s:
            curve.pop()
        if not curve or plan.step_s < curve[-1].step_s:
            curve.append(plan)
    return tuple(curve)


def advise_background(
    problem: WidthProblem, plan: WidthPlan, slowdown: float = ALLOWED_SLOWDOWN
) -> BackgroundAdvice:
    """What may run beside `plan`, where that makes its step at most `slowdown` times longer.

    The bound: of `slowdown` steps' time on all devices, what the step does not work itself.
    """
    if not 1.0 <= slowdown < inf:
        raise OptionError(f"slowdown {slowdown} must be at least 1, which is none")
    available_s = problem.devices * plan.step_s
    idle_s = max(0.0, available_s - plan.device_s)
    summing_s = sum(
        problem.sync_s(layer, plan.widths[layer.name]) for layer in problem.profile.layers
    )
    share = (idle_s + (slowdown - 1) * available_s) / (slowdown * available_s)
    return BackgroundAdvice(idle_s, summing_s, slowdown * plan.step_s, share)

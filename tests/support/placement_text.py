"""A placement with its plan as lines for people: what leaves, the tasks, and when all of it runs.

In: a Plan. Out: text. Times are in microseconds, rounded, so that no last bit shows.
"""

from __future__ import annotations

from collections.abc import Iterator

from cotrain_compile.machine import Tier
from cotrain_compile.plan import Plan
from tests.support.plan_text import lines as task_lines


def text(plan: Plan) -> str:
    """The lines of `plan`, without one for what stays where it is."""
    return "\n".join(_lines(plan))


def _lines(plan: Plan) -> Iterator[str]:
    placement = plan.placement
    for name, home in placement.homes.items():
        if home is Tier.HOST:
            yield f"{name} = home(host)"
    for param, mode in placement.updates.items():
        yield f"{param} = update({mode})"
    for name in placement.offloaded:
        yield f"{name} = offloaded()"
    for name in placement.recomputed:
        yield f"{name} = recompute()"
    if placement.layers_per_pack:
        yield f"layers = packs({placement.layers_per_pack})"
    yield ""
    yield from task_lines(plan.tasks, plan.moved)
    for lane in dict.fromkeys(span.lane for span in plan.predicted.spans):
        yield ""
        yield f"{lane}, us"
        for span in plan.predicted.lane(lane):
            yield f"{1e6 * span.start_s:9.1f} {1e6 * span.end_s:9.1f}  {span.name}"
    yield ""
    for tier, nbytes in plan.predicted.peak_bytes.items():
        yield f"peak on the {tier}: {nbytes} bytes"

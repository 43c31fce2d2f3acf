"""Last end: when works are done that nothing slows; quicker than a timeline, to compare plans."""

from __future__ import annotations

from collections.abc import Iterable

from cotrain_compile.errors import PlanError
from cotrain_compile.placement.simulate.engine import Work


def last_end_s(works: Iterable[Work]) -> float:
    """Seconds of one step of `works`, as `simulate` has them where each lane runs one at a time.

    Raises:
        PlanError: works wait for each other, or for one that is not there.
    """
    lanes: dict[str, list[Work]] = {}
    for work in works:
        lanes.setdefault(work.lane, []).append(work)
    for queue in lanes.values():
        queue.reverse()
    free_s = dict.fromkeys(lanes, 0.0)
    ends: dict[str, float] = {}
    while lanes:
        waiting = {lane: len(queue) for lane, queue in lanes.items()}
        for lane, queue in lanes.items():
            now_s = free_s[lane]
            while queue and all(name in ends for name in queue[-1].after):
                work = queue.pop()
                now_s = max([now_s, *[ends[name] for name in work.after]]) + work.seconds
                ends[work.name] = now_s
            free_s[lane] = now_s
        if all(waiting[lane] == len(queue) for lane, queue in lanes.items()):
            heads = ", ".join(queue[-1].name for queue in lanes.values())
            raise PlanError(f"works can never start, the first on their lanes are {heads}")
        lanes = {lane: queue for lane, queue in lanes.items() if queue}
    return max(free_s.values(), default=0.0)

"""Near the least: what a search by itself finds there, and in a little more memory."""

from __future__ import annotations

from cotrain_compile.machine import MEMORIES
from cotrain_compile.placement.problem import formulate
from cotrain_compile.placement.schedule.schedule import schedule
from cotrain_compile.placement.search.infeasible import least_of
from cotrain_compile.placement.search.solve import SolveSettings, solve
from cotrain_compile.plan import UpdateMode
from cotrain_compile.presets import find
from tests.support.nets import MIB, STEPS
from tests.support.random_problems import PLENTY, resident_bytes, with_budget


def test_a_budget_by_itself_has_a_faster_plan_than_a_smaller_one() -> None:
    """It was 24 % slower where no plan was looked for in less memory."""
    dataflow = STEPS["recurrent"](4, MIB, 2 * MIB)
    free = formulate(dataflow, find("rtx4090"), dict.fromkeys(MEMORIES, PLENTY))
    least, most = least_of(free).nbytes, resident_bytes(free)
    settings = SolveSettings(work_limit=2, recompute=False)
    smaller, larger = (
        solve(with_budget(free, least + int(share * (most - least))), settings)
        for share in (0.2, 0.35)
    )
    assert larger.predicted.makespan_s < smaller.predicted.makespan_s


def test_at_the_least_updates_stay_on_the_device_where_that_is_faster() -> None:
    """By a quarter at least than with everything offloaded, as a loose program decides."""
    dataflow = STEPS["clipped"](3, 2 * MIB, 8 * MIB)
    free = formulate(dataflow, find("rtx4090"), dict.fromkeys(MEMORIES, PLENTY))
    least = least_of(free)
    tight = with_budget(free, least.nbytes)
    plan = solve(tight, SolveSettings(work_limit=2, recompute=False))
    everything_offloaded = schedule(tight, least.placement)
    assert UpdateMode.STREAMED in plan.placement.updates.values()
    assert plan.predicted.makespan_s < 0.75 * everything_offloaded.predicted.makespan_s

"""A strategy that nobody knows, added in one place, is everywhere: from the program to the words.

It streams half of the states of a parameter and keeps the others. Where the link is slow, the host
slower still, and half of the states have room, that is the best there is.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest

from cotrain_compile.dataflow import Dataflow
from cotrain_compile.machine import MEMORIES, Tier
from cotrain_compile.placement.check.check import check
from cotrain_compile.placement.decisions import strategies
from cotrain_compile.placement.decisions.clusters import ParamCluster
from cotrain_compile.placement.decisions.find_decisions import decision_space
from cotrain_compile.placement.decisions.strategies import PARAM_STRATEGIES, Placed, Strategy
from cotrain_compile.placement.explain.explain import explain
from cotrain_compile.placement.milp.model import MIB
from cotrain_compile.placement.milp.program import Program
from cotrain_compile.placement.problem import formulate
from cotrain_compile.placement.search.greedy import greedy
from cotrain_compile.placement.search.solve import solve
from cotrain_compile.plan import UpdateMode
from tests.support.nets import STEPS
from tests.support.random_problems import PLENTY, resident_bytes, with_budget
from tests.unit.placement.test_regimes import machine

SLOW_LINK_SLOWER_HOST = machine(1e12, 1000e9, 1e9, 0.1e9)


@dataclass(frozen=True)
class HalfStreamed(Strategy):
    """As `STREAMED`, but the first state stays on the device."""

    mode: UpdateMode | None = UpdateMode.STREAMED
    fetches: int = 0

    @property
    def words(self) -> str:
        return "half of the states streamed"

    def placed(self, dataflow: Dataflow, param: str, fetched: str) -> Placed:
        whole = super().placed(dataflow, param, fetched)
        first = dataflow.update[param].states[0]
        return replace(whole, homes={**whole.homes, first: Tier.DEVICE})

    def _streamed_states(self, c: ParamCluster) -> int:
        return c.state_bytes // 2


def test_a_made_up_strategy_is_known_everywhere(monkeypatch: pytest.MonkeyPatch) -> None:
    step = STEPS["perceptron"](1, 8 << 20, 4 << 20)
    roomy = formulate(step, SLOW_LINK_SLOWER_HOST, dict.fromkeys(MEMORIES, PLENTY))
    half_bytes = step.buffer["v_w0"].nbytes
    problem = with_budget(roomy, resident_bytes(roomy) - half_bytes)
    before = solve(problem)
    assert before.report is not None
    half = HalfStreamed()
    monkeypatch.setattr(strategies, "PARAM_STRATEGIES", (*PARAM_STRATEGIES, half))

    space = decision_space(problem)
    budgets_mib = (problem.budgets[Tier.DEVICE] / MIB, problem.budgets[Tier.HOST] / MIB)
    for relaxed in (False, True):
        program = Program(space, *budgets_mib, relaxed=relaxed)
        z = program.params[0][space.params[0].strategies.index(half)]
        assert sum(z.number in row.terms for row in program.linear.rows) > 5
    assert greedy(space, problem.budgets[Tier.DEVICE], half_bytes).params == (half,)

    plan = solve(problem)
    check(problem, plan)
    assert {transfer.buffer for transfer in plan.transfers} == {"v_w0"}
    assert plan.report is not None
    assert plan.predicted.makespan_s < 0.6 * before.predicted.makespan_s
    assert plan.report.lower_bound_s < 0.6 * before.report.lower_bound_s
    assert plan.report.lower_bound_s <= plan.predicted.makespan_s

    assert "kept        half of the states streamed" in str(explain(problem, plan, "w0"))
    assert "\n  half of the states streamed" in str(explain(problem, before, "w0"))

"""What ranks exchange takes the network, beside the device, until an op awaits it."""

from __future__ import annotations

from dataclasses import replace

import pytest

from cotrain_compile import files
from cotrain_compile.dataflow import Buffer, Collective, Dataflow, Op, Phase, Role
from cotrain_compile.errors import PlacementError, PlanError
from cotrain_compile.machine import MEMORIES, Network, Tier
from cotrain_compile.placement.check.check import check
from cotrain_compile.placement.decisions.find_decisions import decision_space
from cotrain_compile.placement.milp.program import Program
from cotrain_compile.placement.milp.solvers import solve_program
from cotrain_compile.placement.policies import streamed
from cotrain_compile.placement.problem import Problem, formulate
from cotrain_compile.placement.schedule.schedule import schedule
from cotrain_compile.placement.search.solve import SolveSettings, solve
from cotrain_compile.placement.work import Allowance, Meter
from cotrain_compile.plan import Lane, Transfer
from cotrain_compile.presets import find
from tests.support.dataflows import chain
from tests.support.exchanging import exchanging
from tests.support.random_problems import PLENTY

RANKS, NBYTES = 4, 400_000_000
PRESET = find("rtx4090")
CARD = PRESET.but(device=replace(PRESET.device, factors={}))  # an op takes what its flops take
RATE = CARD.device.flops_per_s_of("float32")


def two_exchanges(beside_s: float) -> Dataflow:
    """Two gradients are reduced, while the device works for so long behind each."""
    reduced = Collective("all_reduce", RANKS, NBYTES)
    buffers = [Buffer("x", 4, Role.BATCH, is_input=True), Buffer("end", 4, Role.TEMPORARY)]
    ops: list[Op] = []
    for number in range(2):
        gradient, work = f"g{number}", f"work{number}"
        buffers += [Buffer(gradient, NBYTES, Role.TEMPORARY), Buffer(work, 4, Role.TEMPORARY)]
        begin = Op(f"begin{number}", "all_reduce", Phase.BACKWARD, ("x",), (gradient,))
        ops.append(replace(begin, collective=reduced, cost_is_known=False, bytes_moved=8))
        flops = int(beside_s * RATE)
        ops.append(Op(f"work{number}", "mm", Phase.BACKWARD, ("x",), (work,), flops))
    for number in range(2):
        waited = (f"g{number}",)
        wait = Op(f"wait{number}", "wait", Phase.BACKWARD, waited, waited)
        ops.append(replace(wait, awaits=f"begin{number}"))
    ops.append(Op("use", "add", Phase.OPTIMIZER, ("g0", "g1"), ("end",)))
    return Dataflow("exchanges", tuple(ops), tuple(buffers))


def problem(beside_s: float, network: Network | None) -> Problem:
    machine = CARD.but(network=network) if network else CARD
    return formulate(two_exchanges(beside_s), machine, dict.fromkeys(MEMORIES, 1 << 34))


@pytest.mark.parametrize(
    ("kind", "wire_bytes", "rounds"),
    [("all_reduce", 600, 6), ("all_gather_into_tensor", 300, 3), ("broadcast", 400, 3)],
)
def test_a_ring_sends_so_many_bytes_in_so_many_rounds(
    kind: str, wire_bytes: float, rounds: int
) -> None:
    exchange = Collective(kind, 4, 400)
    assert (exchange.wire_bytes, exchange.rounds) == (wire_bytes, rounds)
    alone = Collective(kind, 1, 400)
    assert (alone.wire_bytes, alone.rounds) == (0, 0)


def test_a_scatter_takes_as_many_times_a_ring_as_the_network_says() -> None:
    step = two_exchanges(0.1)
    ops = tuple(
        replace(op, collective=replace(op.collective, kind="reduce_scatter_tensor"))
        if op.collective
        else op
        for op in step.ops
    )
    scattering = replace(step, ops=ops)
    for scatter in (1.0, 2.0):
        machine = CARD.but(network=Network(1e9, 0.01, scatter))
        costs = formulate(scattering, machine, dict.fromkeys(MEMORIES, 1 << 34)).costs
        # 0.3 GB at 1 GB/s and 3 rounds of 10 ms.
        assert list(costs.network_s.values()) == pytest.approx([scatter * 0.33] * 2)
    with pytest.raises(ValueError, match="at least 1"):
        Network(1e9, 0.0, 0.5)


# An exchange takes 0.6 GB at 1 GB/s and 6 rounds of 10 ms: 0.66 s.
@pytest.mark.parametrize(("beside_s", "step_s"), [(0.1, 2 * 0.66), (1.0, 1.0 + 1.0)])
def test_an_exchange_runs_beside_the_device_until_it_is_awaited(
    beside_s: float, step_s: float
) -> None:
    asked = problem(beside_s, Network(1e9, 0.01))
    plan = solve(asked, SolveSettings(policy="resident"))
    check(asked, plan)
    assert plan.predicted.makespan_s == pytest.approx(step_s, rel=1e-3)
    assert plan.predicted.busy_s(Lane.NETWORK) == pytest.approx(2 * 0.66)
    assert not asked.unknown_ops
    assert plan.report is None or plan.report.lower_bound_s <= plan.predicted.makespan_s


@pytest.mark.parametrize("beside_s", [0.1, 1.0])
def test_the_bound_knows_what_waits_for_the_network(beside_s: float) -> None:
    asked = problem(beside_s, Network(1e9, 0.01))
    report = solve(asked, SolveSettings(work_limit=5.0)).report
    assert report is not None
    assert report.lower_bound_s == pytest.approx(min(report.simulated_s.values()), rel=2e-3)


def test_a_bucket_of_the_step_takes_the_exchanges_that_it_waits_for() -> None:
    """Work of the host is no reason to wait less: the network is a lane of its own."""
    step = exchanging(chain(4, width=512, batch=512), most_under_way=0)
    free = formulate(step, CARD.but(network=Network(1e9, 0.0)), dict.fromkeys(MEMORIES, 1 << 34))
    network_s = sum(free.costs.network_s.values())
    space = decision_space(free, 8, at_peaks=True)
    device_s = sum(space.seconds)
    assert space.network.chain_s == pytest.approx(network_s + device_s, rel=1e-6)
    program = Program(space, 1 << 14, 1 << 14, relaxed=True)
    solution = solve_program(program, "highs", work=Allowance(Meter(), 10.0), gap=1e-3, seed=0)
    assert solution.bound_s >= (network_s + device_s) * (1 - 1e-3)


def test_what_is_under_way_is_left_where_it_is() -> None:
    """Nothing else in the step is as large: under this budget one of the two has to leave."""
    asked = problem(1.0, Network(1e9, 0.01))
    plan = solve(asked, SolveSettings(policy="resident"))
    sent = Transfer("offload.g0", "offload", "g0", NBYTES, "begin0", "work0")
    back = Transfer("prefetch.g0", "prefetch", "g0", NBYTES, "begin1", "wait0", ("offload.g0",))
    moved = replace(plan, tasks=(sent, back))
    with pytest.raises(PlanError, match=r"may read g0 .* before the exchange of begin0 is done"):
        check(asked, replace(moved, placement=replace(plan.placement, offloaded=("g0",))))
    less = asked.with_budget(Tier.DEVICE, int(1.5 * NBYTES))
    with pytest.raises(PlacementError):
        solve(less, SolveSettings(policy="greedy"))


def test_without_a_network_what_an_exchange_takes_is_unknown() -> None:
    asked = problem(0.1, None)
    assert [op.name for op in asked.unknown_ops] == ["begin0", "begin1"]
    assert not solve(asked, SolveSettings(policy="resident")).predicted.lane(Lane.NETWORK)


def test_a_name_of_a_machine_can_say_how_fast_its_network_is() -> None:
    machine = find("rtx4090 network=25GB")
    assert machine.network is not None
    assert machine.network.bytes_per_s == 25e9
    assert files.from_json(files.to_json(machine), type(machine)) == machine
    assert machine.but(issue_s=1e-6).network == machine.network


def test_what_nobody_has_begun_is_not_awaited() -> None:
    op = Op("wait", "wait", Phase.BACKWARD, (), (), awaits="begin")
    with pytest.raises(ValueError, match="awaits begin, which has begun no exchange"):
        Dataflow("none", (op,), ())


@pytest.mark.parametrize("offloaded", range(5))
def test_a_wait_that_a_moved_update_is_behind_stays_where_it_is(offloaded: int) -> None:
    """Where a gradient leaves, its update begins behind the wait for another one."""
    step = exchanging(chain(5, width=2048, batch=64), 1, "reduce_scatter_tensor")
    placement = replace(
        streamed(step), offloaded=(step.updates[offloaded].gradient,), early_updates=True
    )
    machine = find("rtx4090").but(network=Network(2e10))
    problem = formulate(step, machine, dict.fromkeys(MEMORIES, PLENTY))
    plan = schedule(problem, placement)
    check(problem, plan)
    assert len(plan.moved) == len(step.updates)

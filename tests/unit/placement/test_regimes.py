"""What others chose by hand falls out of the program on the machines they chose it for.

ZeRO-Offload (USENIX ATC 2021): gradients and updates on the host where the device and the link are
slow and the host is fast. CoTrain (ICPP 2023): the first layers, whose weights are needed soonest
after their update, are updated on the device. CoTrain lets updates run into the next step; plans
are complete when their step is. So a plan is compared with CoTrain's schedule of one whole step,
and its period with the period of CoTrain's.
"""

from __future__ import annotations

import itertools
import json
from collections import Counter
from dataclasses import replace
from typing import Any

import pytest

from cotrain_compile.analysis.costs import CostTable
from cotrain_compile.machine import HostUpdate, Link, Machine, Tier, TierSpec, two_tier
from cotrain_compile.placement.check.check import check
from cotrain_compile.placement.decisions.clusters import ParamCluster
from cotrain_compile.placement.decisions.find_decisions import decision_space
from cotrain_compile.placement.placed import place_plan
from cotrain_compile.placement.policies import coarse, resident
from cotrain_compile.placement.problem import Problem, formulate
from cotrain_compile.placement.schedule.schedule import schedule
from cotrain_compile.placement.search.solve import SolveSettings, solve
from cotrain_compile.placement.simulate.engine import simulate, steady_state
from cotrain_compile.placement.simulate.predict import predict_steady_state
from cotrain_compile.plan import Placement, Plan, UpdateMode
from tests.support.cotrain_schedules import LANES, Layers, cotrain
from tests.support.dataflows import mixed_precision_step
from tests.support.nets import Layer, step_of
from tests.support.random_problems import PLENTY, with_budget
from tests.unit.placement.test_harmony import DATA, DEVICE_BYTES_PER_S, LINK_BYTES_PER_S, bert_large

# Microbatch and prefix: no layer kept and many, a host that is busy all along and one that waits.
OFTEN = (("1", 0), ("8", 2), ("32", 10))
# What is optimal does not depend on how busy this computer is.
UNHURRIED_S = 120.0
LAYERS, PARAMS = 12, 4_000_000
LARGE_MODEL = mixed_precision_step(LAYERS, params=PARAMS, batch_bytes=4096)


def machine(device_flops: float, device_bytes: float, link_bytes: float, host: float) -> Machine:
    """Rates per second; `host` is that of updates, in bytes."""
    return two_tier(
        name="regime",
        device=TierSpec(PLENTY, device_bytes, {"float32": device_flops}),
        host=TierSpec(PLENTY, 100e9, {"float32": 1e12}),
        h2d=Link(link_bytes),
        d2h=Link(link_bytes),
        host_update=HostUpdate(host),
    )


SLOW_DEVICE_SLOW_LINK_FAST_HOST = machine(1e9, 100e9, 2e9, 200e9)
FAST_LINK_SLOW_HOST = machine(1e9, 100e9, 100e9, 0.1e9)
FAST_DEVICE_SLOW_LINK_SLOW_HOST = machine(1e10, 1000e9, 1e9, 1e9)


def best_plan(on: Machine, bytes_per_param: float) -> Plan:
    """The program's own plan for the large model: no other rule has a say."""
    device_bytes = int(bytes_per_param * LAYERS * PARAMS)
    problem = formulate(LARGE_MODEL, on, {Tier.DEVICE: device_bytes, Tier.HOST: PLENTY})
    plan = solve(problem, SolveSettings("ilp", work_limit=UNHURRIED_S))
    check(problem, plan)
    return plan


def modes(plan: Plan) -> Counter[UpdateMode]:
    return Counter(plan.placement.updates.values())


def test_the_strategies_of_a_cluster_take_the_bytes_of_zero_offloads_table_1() -> None:
    """16, 14, 4 and 2 bytes a parameter: all here, gradient gone, update gone, both gone."""
    problem = formulate(LARGE_MODEL, FAST_LINK_SLOW_HOST, {Tier.DEVICE: PLENTY, Tier.HOST: PLENTY})
    for decision in decision_space(problem).params:
        cluster = decision.cluster
        count = PARAMS * len(cluster.params)
        assert cluster.param_unused
        assert [
            copies(cluster, update=update, gradient=gradient) / count
            for update in (True, False)
            for gradient in (True, False)
        ] == [16, 14, 4, 2]


def copies(cluster: ParamCluster, *, update: bool, gradient: bool) -> int:
    """Bytes on the device with the low-precision copy: with what is updated, with the gradient."""
    updated = cluster.param_bytes + cluster.state_bytes + cluster.small_state_bytes
    return cluster.fetched_bytes + update * updated + gradient * cluster.gradient_bytes


@pytest.mark.parametrize("bytes_per_param", [2.6, 4, 8, 14, 20])
def test_zero_offload_is_the_optimum_where_only_the_host_is_fast(bytes_per_param: float) -> None:
    """Low-precision weights on the device, each fetched once; all else on the host: 2 bytes."""
    plan = best_plan(SLOW_DEVICE_SLOW_LINK_FAST_HOST, bytes_per_param)
    assert modes(plan) == {UpdateMode.HOST_STREAMED: LAYERS}
    assert plan.placement.offloaded == ()
    moved = plan.bytes_moved("offload"), plan.bytes_moved("prefetch")
    assert moved == (2 * LAYERS * PARAMS, 2 * LAYERS * PARAMS)
    assert 2 <= plan.predicted.peak_bytes[Tier.DEVICE] / (LAYERS * PARAMS) <= 2.4
    assert plan.report is not None
    assert plan.predicted.makespan_s <= 1.02 * plan.report.lower_bound_s


@pytest.mark.parametrize("bytes_per_param", [6, 8, 12, 20])
def test_streaming_is_the_optimum_where_the_link_is_fast_and_the_host_slow(
    bytes_per_param: float,
) -> None:
    """But for the layer that is updated last: nothing would hide its way home."""
    plan = best_plan(FAST_LINK_SLOW_HOST, bytes_per_param)
    assert modes(plan) == {UpdateMode.STREAMED: LAYERS - 1, UpdateMode.RESIDENT: 1}
    assert plan.placement.updates["p32_0"] is UpdateMode.RESIDENT
    assert plan.report is not None
    assert plan.predicted.makespan_s <= 1.02 * plan.report.lower_bound_s


@pytest.mark.parametrize("bytes_per_param", [15, 30])
def test_all_resident_is_the_optimum_where_link_and_host_are_slow(bytes_per_param: float) -> None:
    plan = best_plan(FAST_DEVICE_SLOW_LINK_SLOW_HOST, bytes_per_param)
    assert modes(plan) == {UpdateMode.RESIDENT: LAYERS}
    assert plan.transfers == ()


@pytest.fixture(scope="module")
def harmony() -> dict[str, Any]:
    data: dict[str, Any] = json.loads(DATA.read_text(encoding="utf-8"))
    return data


def bert_problem(harmony: dict[str, Any], microbatch: str) -> Problem:
    """BERT-large as Harmony measured it: one op a layer and pass, inputs kept between layers."""
    layers, weights = bert_large(harmony, microbatch), harmony["param_bytes"]
    made = [*map(int, harmony["input_act_bytes"][microbatch][1:]), 4]
    net = [
        Layer(
            f"l{i}", (f"l{i - 1}" if i else "x",), f"w{i}" if weights[i] else "", weights[i], nbytes
        )
        for i, nbytes in enumerate(made)
    ]
    device_s = {"loss_op": 0.0}
    for i in range(layers.count):
        device_s[f"f_l{i}"], device_s[f"b_l{i}"] = layers.forward_s[i], layers.backward_s[i]
        device_s[f"u_w{i}"] = layers.device_update_s[i]
    host_s = {f"w{i}": seconds for i, seconds in enumerate(layers.host_update_s)}
    on = machine(1e13, DEVICE_BYTES_PER_S, LINK_BYTES_PER_S, 1e10)
    budgets = {Tier.DEVICE: PLENTY, Tier.HOST: PLENTY}
    return Problem(step_of("bert-large", net), on, CostTable(device_s, host_s, "measured"), budgets)


def fine(problem: Problem, prefix: int) -> Placement:
    """CoTrain's placement: the first layers resident, all other updates on the host."""
    here, there = resident(problem.dataflow), coarse(problem.dataflow)
    first = [group for group in problem.dataflow.updates if int(group.param[1:]) < prefix]
    kept = {state for group in first for state in group.states}
    return replace(
        there,
        policy="cotrain",
        homes={**there.homes, **{state: here.homes[state] for state in kept}},
        updates={**there.updates, **{group.param: UpdateMode.RESIDENT for group in first}},
    )


def resident_layers(plan: Plan) -> list[int]:
    modes = plan.placement.updates.items()
    return sorted(int(param[1:]) for param, mode in modes if mode is UpdateMode.RESIDENT)


def step_and_period_s(layers: Layers, prefix: int) -> tuple[float, float]:
    """CoTrain's schedule by hand: one step from start to end, and the period of many."""
    works = cotrain(layers, prefix)
    return simulate(works, LANES).makespan_s, steady_state(works, LANES).period_s


@pytest.mark.parametrize(
    ("microbatch", "prefix"),
    [
        pytest.param(*each, marks=() if each in OFTEN else pytest.mark.long)
        for each in itertools.product(("1", "8", "32"), (0, 2, 10))
    ],
)
def test_bert_large_keeps_its_first_layers_and_is_no_slower_than_cotrain(
    harmony: dict[str, Any], microbatch: str, prefix: int
) -> None:
    """At the device memory that CoTrain's own placement takes, for every prefix."""
    free = bert_problem(harmony, microbatch)
    by_hand = schedule(free, fine(free, prefix))
    step_s, period_s = step_and_period_s(bert_large(harmony, microbatch), prefix)
    assert by_hand.predicted.makespan_s == pytest.approx(step_s, rel=1e-6)
    problem = with_budget(free, by_hand.predicted.peak_bytes[Tier.DEVICE])
    plan = solve(problem)
    check(problem, plan)
    assert plan.predicted.makespan_s <= step_s * (1 + 1e-9)
    stays = resident_layers(plan)
    assert stays == list(range(len(stays)))
    periodic = predict_steady_state(place_plan(problem, plan), steps=4)
    assert periodic.period_s <= 1.001 * period_s


def own_plan(harmony: dict[str, Any], microbatch: str) -> tuple[Plan, int, float]:
    """The program's plan in the memory of CoTrain's best prefix; that prefix, and its step."""
    free, layers = bert_problem(harmony, microbatch), bert_large(harmony, microbatch)
    step_s = [step_and_period_s(layers, prefix)[0] for prefix in range(layers.count)]
    best = step_s.index(min(step_s))
    device_bytes = schedule(free, fine(free, best)).predicted.peak_bytes[Tier.DEVICE]
    problem = with_budget(free, device_bytes)
    plan = solve(problem, SolveSettings("ilp", gap=1e-4, work_limit=UNHURRIED_S))
    check(problem, plan)
    return plan, best, min(step_s)


@pytest.mark.parametrize(
    "microbatch",
    [
        pytest.param(size, marks=() if size in ("3", "8", "32") else pytest.mark.long)
        for size in ("3", "4", "5", "6", "8", "9", "10", "12", "16", "32")
    ],
)
def test_the_program_alone_finds_the_best_prefix(harmony: dict[str, Any], microbatch: str) -> None:
    plan, best, step_s = own_plan(harmony, microbatch)
    assert resident_layers(plan) == list(range(best))
    assert plan.predicted.makespan_s <= step_s * (1 + 1e-9)


@pytest.mark.long
@pytest.mark.parametrize("microbatch", ["1", "2"])
def test_where_the_host_is_busy_all_along_only_the_first_layers_matter(
    harmony: dict[str, Any], microbatch: str
) -> None:
    """More layers stay than the first two because the host has too much to do, and to the program
    they are all alike. It is no longer a prefix, and at most half a percent slower than the best.
    """
    plan, best, step_s = own_plan(harmony, microbatch)
    stays = resident_layers(plan)
    assert stays[:2] == [0, 1]
    assert len(stays) <= best + 1
    assert plan.predicted.makespan_s <= 1.005 * step_s

"""Random problems for the program and the ladder: small steps on any machine, with budgets between
what the step needs at the least and what it takes when nothing moves.
"""

from __future__ import annotations

from dataclasses import replace

from hypothesis import strategies as st

from cotrain_compile.dataflow import Dataflow
from cotrain_compile.errors import PlacementError
from cotrain_compile.machine import HostUpdate, Link, Machine, Network, Tier, TierSpec, two_tier
from cotrain_compile.placement.policies import resident
from cotrain_compile.placement.problem import Problem, formulate
from cotrain_compile.placement.schedule.schedule import draft, schedule
from cotrain_compile.placement.search.solve import SolveSettings, solve
from tests.support.dataflows import chain, mixed_precision_step
from tests.support.exchanging import exchanging
from tests.support.factories import KINDS, per_sample_step, with_factories
from tests.support.nets import KIB, STEPS
from tests.support.with_small import with_small
from tests.support.with_views import with_views
from tests.support.written_out import written_out

PLENTY = 1 << 40
GB_PER_S = 1e9


@st.composite
def machines(draw: st.DrawFn) -> Machine:
    """Any ratio of compute, links and host that steps of a few MiB can tell apart."""
    rates = st.sampled_from([1, 2, 3, 5, 8, 13, 21, 34])
    latency_s = draw(st.sampled_from([0.0, 1e-5]))
    device = TierSpec(PLENTY, 20 * draw(rates) * GB_PER_S, {"float32": draw(rates) * 1e11}, 1e-6)
    return two_tier(
        name="drawn",
        device=device,
        host=TierSpec(PLENTY, 2 * draw(rates) * GB_PER_S, {"float32": 1e11}, 1e-6),
        h2d=Link(draw(rates) * GB_PER_S, latency_s),
        d2h=Link(draw(rates) * GB_PER_S, latency_s),
        host_update=HostUpdate(
            2 * draw(rates) * GB_PER_S,
            workers=draw(st.integers(1, 3)),
            slowdown_while_copying=draw(st.sampled_from([1.0, 1.2, 1.5, 2.0])),
        ),
        duplex=draw(st.sampled_from([1.0, 1.3, 1.6, 2.0])),
    )


@st.composite
def training_steps(draw: st.DrawFn, most: int = 3) -> Dataflow:
    """Any kind of step, with up to `most` layers (levels, time steps)."""
    size = draw(st.integers(1, most))
    kind = draw(st.sampled_from(["chain", "mixed", *STEPS]))
    if kind == "chain":
        return chain(size, width=64 * draw(st.integers(2, 12)), batch=64 * draw(st.integers(1, 24)))
    if kind == "mixed":
        params = draw(st.sampled_from([40_000, 300_000, 1_000_000]))
        batch_bytes = draw(st.sampled_from([100_000, 1_000_000, 5_000_000]))
        return mixed_precision_step(size, params=params, batch_bytes=batch_bytes)
    unit = KIB * draw(st.sampled_from([16, 200, 1000, 5000]))
    return STEPS[kind](size, unit, 4 * KIB * draw(st.sampled_from([8, 100, 500, 2000])))


@st.composite
def unusual_steps(draw: st.DrawFn, most: int = 3) -> Dataflow:
    """Steps whose updates read what factory ops make, or whose forward makes gradients itself.

    Some have small parameters, some their updates written out, some views wherever these may stand.
    """
    if draw(st.integers(0, 3)) == 0:
        unit = KIB * draw(st.sampled_from([16, 200, 1000]))
        return per_sample_step(draw(st.integers(1, most)), unit, draw(st.sampled_from([1, 4, 32])))
    dataflow = draw(training_steps(most))
    params = [group.param for group in dataflow.updates]
    kinds = {param: draw(st.sampled_from(KINDS)) for param in params}
    made = with_factories(dataflow, kinds, is_output=draw(st.booleans()))
    if draw(st.booleans()):
        made = with_small(made, [param for param in params if draw(st.booleans())])
    made = written_out(made, in_pieces=draw(st.booleans())) if draw(st.booleans()) else made
    return with_views(made, draw(views())) if draw(st.booleans()) else made


def views() -> st.SearchStrategy[list[tuple[int, tuple[int, ...]]]]:
    """Before which op each view is, and of which buffers."""
    buffers = st.lists(st.integers(0, 99), min_size=1, max_size=3).map(tuple)
    return st.lists(st.tuples(st.integers(0, 99), buffers), max_size=12)


@st.composite
def unusual_problems(draw: st.DrawFn, most: int = 3) -> Problem:
    """As `problems`, of unusual steps."""
    dataflow, machine = draw(unusual_steps(most)), draw(machines())
    return _between(draw, *_of_ranks(draw, dataflow, machine))


@st.composite
def problems(draw: st.DrawFn, most: int = 3) -> Problem:
    """A problem whose budget is somewhere between the least feasible one and all that is used."""
    dataflow, machine = draw(training_steps(most)), draw(machines())
    return _between(draw, *_of_ranks(draw, dataflow, machine))


def _of_ranks(draw: st.DrawFn, dataflow: Dataflow, machine: Machine) -> tuple[Dataflow, Machine]:
    """One in four are steps of ranks that exchange their gradients."""
    if draw(st.integers(0, 3)):
        return dataflow, machine
    kind = draw(st.sampled_from(["all_reduce", "reduce_scatter_tensor"]))
    rate = draw(st.sampled_from([0.3, 1, 5, 21])) * GB_PER_S
    network = Network(rate, draw(st.sampled_from([0.0, 1e-5])))
    return exchanging(dataflow, draw(st.integers(0, 4)), kind), machine.but(network=network)


def _between(draw: st.DrawFn, dataflow: Dataflow, machine: Machine) -> Problem:
    """With a budget between the least feasible one and all that is used."""
    free = formulate(dataflow, machine, {Tier.DEVICE: PLENTY, Tier.HOST: PLENTY})
    least, everything = least_bytes(free), resident_bytes(free)
    return with_budget(free, least + int(draw(st.floats(0, 1)) * max(0, everything - least)))


def with_budget(problem: Problem, device_bytes: int, host_bytes: int | None = None) -> Problem:
    """`problem` with other budgets."""
    host_bytes = problem.budgets[Tier.HOST] if host_bytes is None else host_bytes
    return replace(problem, budgets={Tier.DEVICE: device_bytes, Tier.HOST: host_bytes})


def resident_bytes(problem: Problem) -> int:
    """What the device holds at the peak when nothing moves."""
    plan = schedule(with_budget(problem, PLENTY), resident(problem.dataflow))
    return plan.predicted.peak_bytes[Tier.DEVICE]


def fits(problem: Problem, device_bytes: int) -> bool:
    """Whether nothing has to move."""
    try:
        draft(with_budget(problem, device_bytes), resident(problem.dataflow))
    except PlacementError:
        return False
    return True


def least_bytes(problem: Problem) -> int:
    """The least feasible device budget, by what a refusal says is missing."""
    try:
        solve(with_budget(problem, 0), SolveSettings("greedy"))
    except PlacementError as refusal:
        return refusal.shortfall_bytes
    return 0

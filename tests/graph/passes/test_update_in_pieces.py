"""Updates in pieces: graph and data say the same, planned memory is metered, no number changes."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from cotrain_compile.dataflow import Dataflow
from cotrain_compile.extract import updates
from cotrain_compile.extract.extract import extract
from cotrain_compile.graph.op_calls import PIECE
from cotrain_compile.machine import Tier
from cotrain_compile.passes import run_passes
from cotrain_compile.passes.find_accesses import find_race_in
from cotrain_compile.passes.update_in_pieces import update_in_pieces
from cotrain_compile.placement import pieces
from cotrain_compile.placement.check.check import check
from cotrain_compile.placement.pieces import in_pieces, pieces_under
from cotrain_compile.placement.policies import resident
from cotrain_compile.placement.schedule.find_moves import moves_of
from cotrain_compile.placement.schedule.schedule import schedule, shortfall_bytes
from cotrain_compile.plan import Placement, UpdateMode
from tests.support.captured_steps import (
    TRAININGS,
    Captured,
    captured,
    differences,
    place_step,
    reference,
)

# None clipped, autocast with a copy that the host makes, Muon with AdamW.
SHORT = ("unclipped", "autocast", "muon")
SOME_TRAININGS = pytest.mark.parametrize(
    "name",
    [pytest.param(n, marks=[] if n in SHORT else [pytest.mark.long]) for n in TRAININGS],
)


@pytest.fixture(autouse=True)
def of_few_elements(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(updates, "FEWEST_ELEMENTS", 32)
    monkeypatch.setattr(pieces, "ALIGNED", 8)


def told_again(name: str) -> Captured:
    """A training, with what `extract` says of it now that few elements are enough."""
    return replace(captured(name))


def streamed_at_random(dataflow: Dataflow, rng: random.Random) -> Placement:
    """Some updates streamed, with weights on either tier, in pieces of a few hundred bytes."""
    base = resident(dataflow)
    homes, updates, offloaded = dict(base.homes), dict(base.updates), []
    for group in dataflow.updates:
        states = [name for name in group.states if dataflow.buffer[name].nbytes > 64]
        if not states or rng.random() < 0.2:
            continue
        updates[group.param] = UpdateMode.STREAMED
        homes |= dict.fromkeys(states, Tier.HOST)
        kept = dataflow.kept_gradients.get(group.param)
        if not kept and rng.random() < 0.5:
            homes[group.param] = Tier.HOST
        gradient = dataflow.buffer[group.gradient]
        if not (gradient.is_input or gradient.is_output) and rng.random() < 0.5:
            offloaded.append(group.gradient)
    return replace(
        base,
        homes=homes,
        updates=updates,
        offloaded=tuple(offloaded),
        early_updates=rng.random() < 0.5,
        piece_bytes=rng.choice((128, 256, 1024)),
    )


@SOME_TRAININGS
def test_the_graph_becomes_what_the_dataflow_becomes(name: str) -> None:
    step, rng = told_again(name), random.Random(name)
    dataflow, problem, divided = step.dataflow, step.problem(), 0
    for _ in range(3):
        placement = streamed_at_random(dataflow, rng)
        found = pieces_under(dataflow, placement)
        divided += len(found)
        assert pieces_under(dataflow, placement) == found  # the very same, for every placement
        expected = in_pieces(dataflow, found)
        graph = update_in_pieces(step.step.copy(), schedule(problem, placement)).verify()
        again = extract(graph)
        made = [op for op in again.ops if op.writes and op.target != str(PIECE)]
        assert [(op.name, op.reads, op.writes) for op in made] == [
            (op.name, op.reads, op.writes) for op in expected.ops if op.writes
        ]
        assert {b.name: b.nbytes for b in again.buffers} == {
            b.name: b.nbytes for b in expected.buffers
        }
    assert divided or name in ("tied", "muon")  # Adafactor and Muon mix elements


@SOME_TRAININGS
def test_pieces_change_no_number_and_take_what_is_planned(name: str) -> None:
    step, rng = told_again(name), random.Random(name)
    dataflow, problem = step.dataflow, step.problem()
    for _ in range(2):
        placement = streamed_at_random(dataflow, rng)
        moves = moves_of(problem, placement)
        # In as little memory as there is for it.
        least = shortfall_bytes(problem.with_budget(Tier.DEVICE, 0), moves)
        plan = schedule(problem.with_budget(Tier.DEVICE, least), placement)
        check(problem, plan)
        assert plan.predicted.peak_bytes[Tier.DEVICE] <= least
        assert find_race_in(run_passes(step.step, plan)) is None
        compiled = place_step(step, plan)
        assert not differences(step.train(compiled), reference(name))
        assert compiled.measured is not None
        assert compiled.measured.peak_bytes[Tier.DEVICE] == plan.predicted.peak_bytes[Tier.DEVICE]


def test_what_mixes_elements_goes_as_a_whole() -> None:
    dataflow = told_again("muon").dataflow
    products = [
        group
        for group in dataflow.updates
        if any("mm" in dataflow.ops[dataflow.position[name]].target for name in group.ops)
    ]
    assert products
    assert not any(group.elements for group in products)

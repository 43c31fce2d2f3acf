"""Pipelines over two ranks: equal to one process, within their budgets, and refused together."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.distributed.checkpoint.state_dict_saver import save as save_checkpoint

from cotrain_compile import files
from cotrain_compile.cluster.model.layout import StagePlan
from cotrain_compile.errors import DistributeError
from cotrain_compile.machine import Link, Tier
from cotrain_compile.pipelining.memory import stage_memory
from cotrain_compile.presets import THIS_MACHINE, find
from tests.support import failing_stages
from tests.support.example_scripts import example
from tests.support.pipelines import (
    KINDS,
    SAMPLES,
    STEPS,
    Trained,
    alone,
    clipped,
    example_trained,
    gradients_of,
    judged,
    loss_of,
    made,
    metered,
    plan_of,
    refused,
    trained,
)
from tests.support.ranks import Ranks

# Sums of micro-batches round in another order: what Adam makes of it where a gradient is nearly
# zero is more than a few last places.
ATOL = 2e-3


def check_equal(found: list[Trained], reference: Trained) -> None:
    for of_rank in found:
        assert of_rank.losses == pytest.approx(reference.losses, abs=1e-5)
    names = [name for of_rank in found for name in of_rank.state]
    assert sorted(names) == sorted(reference.state)  # each on one rank
    for of_rank in found:
        for name, value in of_rank.state.items():
            torch.testing.assert_close(value, reference.state[name], rtol=1e-4, atol=ATOL)


@pytest.mark.long
@pytest.mark.parametrize(
    ("kind", "schedule", "layers"),
    [
        ("gpt2", "GPipe", (1,)),
        ("llama", "GPipe", (1,)),
        ("resnet", "1F1B", (2,)),
        ("resnet", "LoopedBFS", (1, 2, 3)),
        ("resnet", "InterleavedZeroBubble", (1, 2, 3)),
    ],
)
def test_stages_train_as_one_process(
    two_ranks: Ranks, kind: str, schedule: str, layers: tuple[int, ...]
) -> None:
    check_equal(two_ranks.run(trained, kind, plan_of(kind, schedule, layers)), alone(kind))


@pytest.mark.long
def test_losses_alone_are_those_of_a_step(two_ranks: Ranks) -> None:
    for found in two_ranks.run(judged, "resnet", plan_of("resnet", "1F1B", (2,))):
        assert found == pytest.approx([0.0] * 4, abs=1e-6)


ONE_EACH = plan_of("resnet", "1F1B", (2,))
SWAPPED = replace(plan_of("resnet", "LoopedBFS", (1, 2, 3)), swapped=True, ahead=True)
TOKENS = 16 * 32 * 4  # bytes of a sample between two layers: tokens, width, float32
PICTURE = 8 * 4 * 4 * 4


@pytest.mark.parametrize(
    ("kind", "schedule", "layers", "sample_bytes", "budget"),
    [
        ("llama", "1F1B", (1,), TOKENS, 180_000),
        # More stages than ranks: weights come and go with the turns, as in Harmony's pipeline.
        ("resnet", "Interleaved1F1B", (1, 2, 3), PICTURE, 50_000),
        ("gpt2", "1F1B", (1,), TOKENS, 200_000),
    ],
)
@pytest.mark.long  # stages that are swapped within a budget are every run's
def test_stages_train_within_a_budget_in_which_they_do_not_fit(
    two_ranks: Ranks,
    kind: str,
    schedule: str,
    layers: tuple[int, ...],
    sample_bytes: int,
    budget: int,
) -> None:
    found = two_ranks.run(metered, kind, plan_of(kind, schedule, layers), budget)
    check_equal([of_rank.trained for of_rank in found], alone(kind))
    crossing = len(layers) * SAMPLES * sample_bytes  # each rank is at one end of every hop
    for of_rank in found:
        assert of_rank.held == 2 * crossing + of_rank.buffer_bytes
        resting = 4 * of_rank.param_bytes  # parameters, gradients, two states
        assert of_rank.held + resting > budget
        assert of_rank.homes == {Tier.HOST}  # of all of these, in every turn
        for planned, seen in of_rank.peaks:
            assert seen == planned <= budget - of_rank.held
        assert of_rank.sent_bytes == STEPS * crossing
        assert "a batch of 7 samples, and the plan has 4 micro-batches of 2" in of_rank.told


@pytest.mark.parametrize("ahead", [pytest.param(False, marks=pytest.mark.long), True])
def test_swapped_stages_come_once_for_all_micro_batches(
    two_ranks: Ranks, tmp_path: Path, ahead: bool
) -> None:
    """Harmony's pipeline: weights twice a step and gradients once, less what stays in between.

    Links are slow, so that a turn that did not wait for its weights would not have them.
    """
    budget = 66_000 if ahead else 60_000
    plan = replace(SWAPPED, ahead=ahead)
    slow = find(THIS_MACHINE).but(h2d=Link(1e6), d2h=Link(1e6))
    files.save(slow, tmp_path / "machine.json")
    options = {"machine": str(tmp_path / "machine.json"), "throttle": True}
    found = two_ranks.run(metered, "resnet", plan, budget, options)
    check_equal([of_rank.trained for of_rank in found], alone("resnet"))
    for of_rank in found:
        fetched, sent, stays = of_rank.swaps
        assert fetched == STEPS * (2 * of_rank.param_bytes - stays)
        assert sent == STEPS * of_rank.param_bytes
        assert of_rank.sent_bytes == STEPS * 3 * SAMPLES * PICTURE
        assert "a batch of 7 samples, and the plan has 4 micro-batches of 2" in of_rank.told
        assert of_rank.held + 4 * of_rank.param_bytes > budget
        for (planned, seen), (beside, there) in zip(of_rank.peaks, of_rank.beside, strict=True):
            assert seen == planned <= budget - of_rank.held - beside
            assert there == beside
        assert any(there for _, there in of_rank.beside) == ahead
    least = 46_000 if ahead else 42_000
    beside = ", and the next one beside it" if ahead else ""
    for told in two_ranks.run(refused, [plan, plan], [least, least]):
        assert f"with all of its parameters{beside}; cut the model into more stages" in told


def test_gradients_are_clipped_by_the_norm_of_the_whole_model(two_ranks: Ranks) -> None:
    inputs, target = KINDS["resnet"].batch(0)
    model = made("resnet")
    for part, wanted in zip(inputs.chunk(4), target.chunk(4), strict=True):
        (loss_of(model(part), wanted) / 4).backward()
    max_norm = 0.5 * float(torch.nn.utils.get_total_norm(gradients_of(model)))
    norm = float(torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm))
    found = two_ranks.run(clipped, "resnet", ONE_EACH, max_norm)
    names = [name for of_rank in found for name in of_rank.gradients]
    assert sorted(names) == sorted(name for name, _ in model.named_parameters())
    for of_rank in found:
        assert of_rank.norm == pytest.approx(norm, rel=1e-5)
        for told in of_rank.told:
            assert "call clip_grad_norm(max_norm) of what pipeline() returned" in told
        for name, gradient in of_rank.gradients.items():
            expected = model.get_parameter(name).grad
            torch.testing.assert_close(gradient, expected, rtol=1e-4, atol=1e-6)


def test_swapped_stages_are_not_for_cards() -> None:
    with pytest.raises(DistributeError, match="run on the emulated device alone; on cards, raise"):
        stage_memory([], SWAPPED, {"device": "cuda"})


def test_ranks_that_cannot_train_together_are_all_told(two_ranks: Ranks) -> None:
    plan = ONE_EACH
    other = replace(plan, schedule="GPipe")
    for told in two_ranks.run(refused, [plan, other], [10**7, 10**7]):
        assert "have another plan than rank" in told
    first, second = two_ranks.run(refused, [plan, plan], [10**7, 1000])
    assert "another rank cannot set up its part: rank 1: what goes from stage to stage, " in first
    assert second.startswith("PlacementError: ")
    for told in two_ranks.run(failing_stages.other_code, plan):
        assert "another code of the model or of the loss than rank" in told
    for plans, told in (
        (plan_of("resnet", "1F1B", (1, 2)), "3 stages, and there are 2 ranks"),
        (plan_of("resnet", "1F1B", (1, 2, 3)), "take Interleaved1F1B or LoopedBFS"),
        (plan_of("resnet", "DualPipe", (2,)), "known are GPipe"),
        (plan_of("llama", "1F1B", (1,)), "take a plan that was made for this model"),
    ):
        for of_rank in two_ranks.run(refused, [plans, plans], [10**7, 10**7]):
            assert told in of_rank


def test_a_step_in_which_one_rank_fails_is_none_and_all_go_on(two_ranks: Ranks) -> None:
    first, last = two_ranks.run(failing_stages.fails_and_goes_on, ONE_EACH)
    for of_rank in (first, last):
        assert of_rank.short.startswith("RanksApart: the ranks are about to do different things")
        assert of_rank.judged == pytest.approx([math.nan] * 4, nan_ok=True)
    assert first.overrun.startswith("RanksApart: rank 1: failed: OutOfDeviceMemory: ")
    assert first.updated.startswith(
        "RanksApart: rank 1: failed: DistributeError: its update failed"
    )
    assert "stages are of different steps: start all ranks again" in first.updated
    for told in (last.overrun, last.updated):
        assert told.startswith("OutOfDeviceMemory: ")
    check_equal_but_counters([first.trained, last.trained])


def test_a_stage_is_updated_while_the_one_before_has_its_last_backward(
    two_ranks: Ranks, tmp_path: Path
) -> None:
    """The first stage waits there for it; where a turn fails, the others say that they updated."""
    first, last = two_ranks.run(failing_stages.updates_just_in_time, ONE_EACH, tmp_path)
    check_equal([first.trained, last.trained], alone("resnet"))
    assert first.told.startswith("OutOfDeviceMemory: ")
    assert first.moved == 0.0
    assert last.told.startswith("RanksApart: rank 0: failed: OutOfDeviceMemory: ")
    assert "This rank has updated its stages (just in time)" in last.told
    assert last.moved > 0


@pytest.mark.long
def test_what_was_fetched_for_turns_that_fail_is_let_go(two_ranks: Ranks) -> None:
    first, last = two_ranks.run(failing_stages.overruns_and_goes_on, SWAPPED)
    assert first[0].startswith("RanksApart: rank 1: failed: OutOfDeviceMemory: ")
    assert last[0].startswith("OutOfDeviceMemory: ")
    check_equal_but_counters([first[1], last[1]])


def check_equal_but_counters(found: list[Trained]) -> None:
    """Running statistics have counted the step that failed."""
    reference = alone("resnet")
    for of_rank in found:
        assert of_rank.losses == pytest.approx(reference.losses, abs=1e-5)
        for name, value in of_rank.state.items():
            if "running" not in name and "tracked" not in name:
                torch.testing.assert_close(value, reference.state[name], rtol=1e-4, atol=ATOL)


@pytest.mark.long
@pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")
def test_the_example_goes_on_from_a_checkpoint_of_one_process(
    two_ranks: Ranks, tmp_path: Path
) -> None:
    """From ranks to one process, and from there to swapped stages; in the end as one alone."""
    plan = tmp_path / "plan.json"
    files.save(StagePlan("1F1B", ("layers.2",), 4, 4), plan)
    script = example("pipeline")
    of_ranks, of_one = tmp_path / "ranks", tmp_path / "one"
    _, first = two_ranks.run(example_trained, plan, 2, None, of_ranks)
    model, optimizer, losses = alone_by(script, 2)
    assert first == pytest.approx(losses, abs=1e-5)

    again, of_again, _ = alone_by(script, 0)
    script.load(of_ranks, again, of_again)
    for name, value in model.state_dict().items():
        torch.testing.assert_close(again.state_dict()[name], value, rtol=1e-4, atol=ATOL)
    states = get_state_dict(again, of_again, options=script.FLAT)
    named = dict(zip(("model", "optimizer"), states, strict=True))
    save_checkpoint(named, checkpoint_id=of_one)
    points = ("layers.1", "layers.2", "layers.3")
    files.save(StagePlan("LoopedBFS", points, 4, 4, swapped=True), plan)
    _, then = two_ranks.run(example_trained, plan, 2, of_one, tmp_path / "end", "96KiB")
    assert then == pytest.approx(steps_by(script, model, optimizer, 2), abs=1e-4)


def alone_by(script: Any, steps: int) -> tuple[torch.nn.Module, torch.optim.Optimizer, list[float]]:
    model = script.make_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    return model, optimizer, steps_by(script, model, optimizer, steps)


def steps_by(
    script: Any, model: torch.nn.Module, optimizer: torch.optim.Optimizer, steps: int
) -> list[float]:
    losses = []
    for number in range(steps):
        x, y = script.batch(number)
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses

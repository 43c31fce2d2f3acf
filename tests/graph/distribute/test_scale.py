"""A row of a plan is a step that trains, equal to one process with the samples of all ranks."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

from cotrain_compile import files
from cotrain_compile.cluster.model.layout import Layout, StagePlan
from cotrain_compile.errors import DistributeError
from cotrain_compile.scaling.by_tokens import by_tokens
from cotrain_compile.scaling.tensor_plans import ExpertParallel, tensor_plan_of
from tests.support.pipelines import gpt2, llama
from tests.support.ranks import Ranks
from tests.support.scaled_checkpoints import alone_goes_on, goes_on
from tests.support.scaled_ranks import (
    SPLITS,
    Case,
    Language,
    Trained,
    alone,
    losses_by_width,
    refused,
    trained,
)

STAGES = StagePlan("1F1B", ("blocks.1",), 2, 2)


def check(ranks: Ranks, case: Case, *, fails: bool = False) -> list[Trained]:
    """Losses of each replica, and all parameters, which every rank has some of."""
    reference, replicas = alone(case), case.layout.replicas
    found: list[Trained] = ranks.run(trained, case, fails)
    for rank, of_rank in enumerate(found):
        assert of_rank.replica == case.layout.replica(rank)
        expected = reference.losses[of_rank.replica :: replicas]
        assert of_rank.losses == pytest.approx(expected, abs=2e-6)
        for name, value in of_rank.state.items():
            torch.testing.assert_close(value, reference.state[name], rtol=1e-5, atol=2e-6)
        if case.budget is not None:
            assert of_rank.peak_bytes <= case.budget
            assert of_rank.moves
    assert {name for of_rank in found for name in of_rank.state} == set(reference.state)
    return found


def test_split_and_sharded_layers_train_within_a_budget(four_ranks: Ranks) -> None:
    check(four_ranks, Case(Layout(shard=2, tensor=2), "mlp", budget=60_000))
    for told in four_ranks.run(refused, {"shard": 2}):
        assert told.startswith("DistributeError: the plan is for 2 ranks (shard 2), and there are")
    for told in four_ranks.run(refused, Layout(shard=2, tensor=2)):
        assert "the plan divides layers, and Language does not say which" in told


@pytest.mark.long
@pytest.mark.parametrize(
    "case",
    [
        Case(Layout(replicate=4, micro_batches=2), budget=80_000),
        Case(Layout(replicate=2, shard=2), budget=60_000, attends=True),
        Case(Layout(replicate=2, tensor=2), "plain", attends=True),
        Case(Layout(shard=2, tensor=2, sequence=True), "tokens", attends=True, budget=56_000),
        Case(Layout(pipeline=2, replicate=2), stages=STAGES),
        Case(Layout(pipeline=2, shard=2), stages=STAGES, budget=40_000),
        Case(Layout(shard=2, tensor=2), "its own"),
        Case(Layout(replicate=2, tensor=2, sequence=True), "its own"),
    ],
    ids=lambda case: f"{case.layout} {case.split}",
)
def test_every_layout_trains_as_one_process(four_ranks: Ranks, case: Case) -> None:
    check(four_ranks, case)


@pytest.mark.long
def test_stages_whose_layers_are_split_train_as_one_process_also_after_a_failure(
    four_ranks: Ranks,
) -> None:
    """Rank 0 learns of it at their next exchange, and the ranks of the other stage from both."""
    stages = replace(STAGES, micro_batch=4)
    case = Case(Layout(pipeline=2, tensor=2), "mlp", budget=40_000, stages=stages)
    first, failed, *others = check(four_ranks, case, fails=True)
    assert failed.overrun.startswith("OutOfDeviceMemory: ")
    for of_rank in (first, *others):
        assert of_rank.overrun.startswith("RanksApart: ")
        assert "rank 1: failed: OutOfDeviceMemory" in of_rank.overrun


@pytest.mark.long
def test_a_shard_of_a_stage_is_gathered_and_scattered_once_a_step(four_ranks: Ranks) -> None:
    """Each rank sends half of what it has of both, not once for each micro-batch."""
    case = Case(Layout(pipeline=2, shard=2), stages=STAGES)
    found = check(four_ranks, case)
    nbytes = sum(value.nbytes for of_rank in found for value in of_rank.state.values()) / 2
    assert sum(of_rank.gathered_bytes for of_rank in found) == 2 * nbytes


@pytest.mark.long
@pytest.mark.parametrize(
    "case",
    [
        Case(Layout(pipeline=2, shard=2, tensor=2), "mlp", stages=STAGES),
        Case(Layout(pipeline=2, shard=2, experts=2), stages=replace(STAGES, micro_batch=1)),
        Case(Layout(pipeline=2, experts=2, tensor=2), "mlp", stages=STAGES),
    ],
    ids=lambda case: str(case.layout),
)
def test_stages_are_divided_in_two_ways(eight_ranks: Ranks, case: Case) -> None:
    check(eight_ranks, case)


@pytest.mark.long
def test_stages_whose_layers_are_divided_by_tokens_train_as_one_process(
    four_ranks: Ranks,
) -> None:
    """Half of the tokens goes from stage to stage on each rank."""
    stages = replace(STAGES, micro_batch=4)
    layout = Layout(pipeline=2, tensor=2, sequence=True)
    check(four_ranks, Case(layout, "tokens", attends=True, stages=stages))


@pytest.mark.long
@pytest.mark.parametrize(
    ("layout", "budget"),
    [
        (Layout(replicate=2, samples=(5, 3), micro_batches=2), 80_000),
        (Layout(shard=2, samples=(6, 2), micro_batches=2), 60_000),
    ],
)
def test_unequal_shares_of_samples_make_the_mean_over_all(
    two_ranks: Ranks, layout: Layout, budget: int
) -> None:
    check(two_ranks, Case(layout, budget=budget))


@pytest.mark.long
@pytest.mark.parametrize(
    "case",
    [
        Case(Layout(replicate=2, experts=2)),
        Case(Layout(shard=2, experts=2), budget=44_000),
        Case(Layout(pipeline=2, experts=2), stages=STAGES),
    ],
    ids=lambda case: str(case.layout),
)
def test_experts_are_divided_beside_other_dimensions(four_ranks: Ranks, case: Case) -> None:
    check(four_ranks, case)


def test_experts_are_divided_and_tokens_go_to_them(two_ranks: Ranks) -> None:
    check(two_ranks, Case(Layout(experts=2), budget=44_000))
    for told in two_ranks.run(refused, Layout(experts=2)):
        assert "divides experts, and nobody knows which modules have them; pass experts=" in told


def test_models_of_other_sizes_train_in_one_process(two_ranks: Ranks) -> None:
    """Sizes of DTensors that differ from those of the step before are no symbols to Dynamo."""
    widths = (8, 12)
    expected = losses_by_width(None, widths)
    for found in two_ranks.run(losses_by_width, widths):
        assert found == pytest.approx(expected, abs=2e-6)


@pytest.mark.long
def test_a_plan_is_a_file(two_ranks: Ranks, tmp_path: Path) -> None:
    files.save(Layout(tensor=2), tmp_path / "plan.json")
    for told in two_ranks.run(refused, tmp_path / "plan.json", "plain"):
        assert "blocks.*.attention.q is to be split, and Language has no such module" in told


def test_a_model_of_hugging_face_says_which_layers_are_split() -> None:
    plan = tensor_plan_of(llama(), None, sequence=False)
    assert isinstance(plan["model.model.layers.*.self_attn.q_proj"], ColwiseParallel)
    assert isinstance(plan["model.model.layers.*.mlp.down_proj"], RowwiseParallel)
    assert "model.lm_head" in plan
    with pytest.raises(DistributeError, match="does not say which"):
        tensor_plan_of(gpt2(), None, sequence=False)
    divided = tensor_plan_of(llama(), None, sequence=True)
    assert divided.keys() - plan.keys() == {
        *(f"model.model.layers.{name}" for name in ("0", "*.self_attn", "*.mlp")),
        *(f"model.model.layers.*.{name}_layernorm" for name in ("input", "post_attention")),
        "model.model.norm",
    }
    with pytest.raises(DistributeError, match="by tokens, and nobody knows where in this model"):
        by_tokens(llama(), {"model.lm_head": ColwiseParallel()})


def test_experts_that_are_not_rows_of_parameters_are_refused(rank_of_two: None) -> None:
    mesh = init_device_mesh("cpu", (2,))
    for module, told in (
        (nn.Linear(3, 3), r"over 2 ranks, and has parameters of \[3\] rows; have one parameter"),
        (nn.ModuleList([nn.Linear(2, 2)] * 2), "rows, and more in modules within it"),
    ):
        with pytest.raises(DistributeError, match=told):
            parallelize_module(module, mesh, ExpertParallel())


def test_a_split_layer_that_shares_its_weight_is_refused() -> None:
    model = Language(attends=False)
    model.head.weight = nn.Parameter(model.embed.weight.detach())
    model.embed.weight = model.head.weight
    with pytest.raises(DistributeError, match=r"head\.weight.* shares its weight with embed\.wei"):
        tensor_plan_of(model, {"head": ColwiseParallel()}, sequence=False)
    assert tensor_plan_of(model, SPLITS["mlp"](), sequence=False)


@pytest.mark.long
@pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")
def test_a_checkpoint_goes_from_layout_to_layout_and_to_one_process(
    four_ranks: Ranks, tmp_path: Path
) -> None:
    """Split and sharded first, then in replicas of stages, which one process goes on from."""
    split = Case(Layout(shard=2, tensor=2), "mlp")
    stages = Case(Layout(pipeline=2, replicate=2), stages=STAGES)
    hybrid = Case(Layout(replicate=2, shard=2))
    folders = [tmp_path / name for name in ("split", "stages", "hybrid")]
    four_ranks.run(goes_on, split, None, folders[0], 0)
    for case, load, save in ((stages, folders[0], folders[1]), (hybrid, folders[0], folders[2])):
        found = four_ranks.run(goes_on, case, load, save, 2)
        expected = alone_goes_on(case, folders[0], 2)
        for rank, losses in enumerate(found):
            own = expected[case.layout.replica(rank) :: case.layout.replicas]
            assert losses == pytest.approx(own, abs=5e-6)
    reference = alone_goes_on(split, folders[2], 4)
    assert alone_goes_on(split, folders[1], 4) == pytest.approx(reference, abs=5e-6)

"""Cut: where a model can be split, and what is refused, on one process without a run."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import cotrain_compile
from cotrain_compile import files
from cotrain_compile.cluster.model.layout import StagePlan
from cotrain_compile.cluster.model.strategy import Answer, RankedStrategy
from cotrain_compile.entry.check_options import check_options
from cotrain_compile.errors import DistributeError, OptionError, PlacementError
from cotrain_compile.pipelining.cut import cut, keep, try_out, visits
from cotrain_compile.pipelining.memory import turn_budgets
from cotrain_compile.pipelining.pipeline import read_plan
from cotrain_compile.pipelining.turns import Turns


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.tanh(self.inner(x))


class Net(nn.Module):
    """`scale` is a parameter beside the modules, read where `scaled` says; `unused` never runs."""

    def __init__(self, scaled: str = "", skips: bool = False, tied: bool = False) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.layers = nn.ModuleList(Layer() for _ in range(3))
        self.norm = nn.BatchNorm1d(4)
        self.unused = nn.Linear(4, 4)
        self.scale = nn.Parameter(torch.ones(4))
        self.scaled, self.skips = scaled, skips
        if tied:
            self.layers[2].get_submodule("inner").weight = self.first.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first = x = self.first(x) * (self.scale if self.scaled == "first" else 1.0)
        for layer in self.layers:
            x = layer(x)
        x = self.norm(x) * (self.scale if self.scaled == "last" else 1.0)
        return x + first if self.skips else x


X = torch.linspace(-1, 1, 8).view(2, 4)


def test_stages_one_behind_the_other_are_the_model() -> None:
    model = Net(scaled="first")
    points = ("layers.1", "norm")
    found = visits(model, points, (X,))
    assert [shape.size for shape in found.crossing] == [(2, 4), (2, 4)]
    assert model.norm.num_batches_tracked == 0  # nothing has run
    parts = [cut(model, points, found, stage) for stage in range(3)]
    for part in parts:
        try_out(part, (X,))
    value = None
    for part in parts:
        value = part(value, (X,))
    assert model.norm.num_batches_tracked == 1
    torch.testing.assert_close(value, model(X), rtol=0, atol=0)
    names = [{name for name, _ in part.module.named_parameters()} for part in parts]
    assert set.union(*names) == {name for name, _ in model.named_parameters()}
    assert {"scale", "unused.weight"} <= names[0]
    assert "layers.1.inner.weight" in names[1]
    assert names[2] == {"norm.weight", "norm.bias"}
    keep(model, points, found, {2})
    assert {name for name, _ in model.named_parameters()} == names[2]


def test_turns_of_equal_stages_are_compiled_apart() -> None:
    """Dynamo would take the code of one for the other, and with it what was planned for that."""
    model = Net()
    points = ("layers.0", "layers.1", "layers.2")
    found = visits(model, points, (X,))
    parts = [cut(model, points, found, stage) for stage in (1, 2)]
    turns = [Turns(part, F.mse_loss, 1.0, (0,), {"quiet": True}, {"quiet": True}) for part in parts]
    for each in turns:
        each.forward(X, (X,))
    first, second = (cotrain_compile.inspect(each.functions[0]) for each in turns)
    assert first is not second


@pytest.mark.parametrize(
    ("model", "points", "told"),
    [
        (Net(), ("layers.9",), "no module of that name"),
        (Net(), ("model.layers.1",), r"is it layers.1\?"),
        (Net(), ("layers.2", "layers.1"), "give split points as they run"),
        (Net(), ("unused",), "unused, which does not run"),
        (Net(), ("layers.1", "layers.1.inner"), "which is within it"),
        (Net(skips=True), ("layers.1",), "beside the first argument"),
        (Net(), ("layers.1.inner",), "beside the first argument"),
        (Net(scaled="last"), ("layers.1",), "a parameter of the model itself"),
        (Net(tied=True), ("layers.1",), "share a parameter; untie them"),
    ],
)
def test_what_cannot_be_cut_is_refused(model: Net, points: tuple[str, ...], told: str) -> None:
    with pytest.raises(DistributeError, match=told):
        try_out(cut(model, points, visits(model, points, (X,)), 1), (X,))


def test_budgets_leave_room_for_what_a_turn_does_not_know_of() -> None:
    roomy = turn_budgets(20_000, [1000, 500], held=1000)
    assert (roomy.held, roomy.update) == (1000, 19_000)
    assert roomy.forward == (14_000, 13_500)  # own parameters are known, of 6,000 bytes that rest
    assert roomy.backward == (15_000, 14_000)  # and own gradients
    tight = turn_budgets(5000, [1000, 500], held=1000)
    assert tight.rests_on_host  # so that each turn has what the others leave
    assert tight.forward == tight.backward == (4000, 4000)
    with pytest.raises(PlacementError, match="from stage to stage, and buffers"):
        turn_budgets(1000, [1], held=1000)


def test_a_plan_has_micro_batches() -> None:
    with pytest.raises(OptionError, match="at least one micro-batch"):
        StagePlan("1F1B", (), 0, 4)


def test_a_saved_answer_has_the_stages_of_its_fastest_pipeline(tmp_path: Path) -> None:
    path = tmp_path / "answer.json"
    stages = StagePlan("1f1b", ("layers.1",), 4, 2)
    other = RankedStrategy("shard")
    files.save(
        Answer("net", "box", 8, (other, RankedStrategy("pipeline-1f1b", stages=stages))), path
    )
    assert read_plan(path) == read_plan(path, "pipeline-1f1b") == stages
    with pytest.raises(OptionError, match="no pipeline 'harmony-pp'; it has pipeline-1f1b"):
        read_plan(path, "harmony-pp")
    files.save(Answer("net", "box", 8, (other,)), path)
    with pytest.raises(OptionError, match="has no pipeline that fits"):
        read_plan(path)


def test_a_plan_of_ranks_is_no_plan_of_a_step(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    best = RankedStrategy("shard", step_s=1.0, fits=True, run="torchrun train.py: in fully_shard")
    files.save(Answer("net", "box", 8, (best,)), path)
    with pytest.raises(OptionError, match=r"its best is shard: torchrun train\.py: in fully_shard"):
        check_options({"plan": str(path)})
    files.save(StagePlan("1F1B", ("layers.1",), 4, 2), path)
    with pytest.raises(OptionError, match=r"give it and the model to cotrain_compile\.pipeline"):
        check_options({"plan": str(path)})


def test_tokens_are_divided_on_both_sides_of_a_split_point() -> None:
    """A stage that gives all tokens where the next gets half of them is found out."""
    model = nn.Sequential(Layer(), Layer(), Layer())
    x = torch.ones(2, 6, 4)
    found = visits(model, ("1", "2"), (x,))
    first, middle = (cut(model, ("1", "2"), found, stage) for stage in (0, 1))
    for part in (first, middle):
        part.divide_tokens(2)
    assert middle.enters is not None
    assert middle.leaves is not None
    assert middle.enters.size == middle.leaves.size == (2, 3, 4)
    try_out(middle, (x,))
    with pytest.raises(DistributeError, match=r"leaves a stage has \[2, 6, 4\] on a rank, and \[2"):
        try_out(first, (x,))
    with pytest.raises(DistributeError, match="over 2 ranks, and it has"):
        middle.divide_tokens(2)

"""What ranks have to compute their updates with alike is compared, and told by name and rank."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn

from cotrain_compile.dataflow import Role
from cotrain_compile.distribute.replicas import Ranks, same_on
from cotrain_compile.distribute.same_numbers import (
    Numbers,
    first_few,
    numbers_of,
    updates_apart,
    values_of,
)
from cotrain_compile.graph import StepGraph, StepInput

aten, c10d = torch.ops.aten, torch.ops._c10d_functional


def step_with(number: Any = 2.0, size: int = 4, table: Tensor | None = None) -> StepGraph:
    """One that exchanges a parameter, and adds it `number` times to itself and to a `table`."""
    graph = fx.Graph()
    param = graph.placeholder("w")
    begun = graph.call_function(c10d.all_reduce.default, (param, "sum", "all"))
    value = graph.call_function(c10d.wait_tensor.default, (begun,))
    value = graph.call_function(aten.view.default, (value, [size]))
    value = graph.call_function(aten.mul.Tensor, (value, number))
    if table is not None:
        value = graph.call_function(aten.add.Tensor, (value, graph.get_attr("table")))
    graph.call_function(aten.copy_.default, (param, value))
    graph.output(())
    root = nn.Module()
    root.register_buffer("table", table)
    return StepGraph(fx.GraphModule(root, graph), (StepInput("w", "w", Role.PARAM),), {})


def apart(*steps: StepGraph) -> list[str]:
    """What is told where the ranks have these."""
    return updates_apart([numbers_of(step) for step in steps], settings_alone=False)


@pytest.mark.parametrize(("here", "there"), [(2.0, 3.0), (2, 3)])
def test_a_number_behind_the_exchange_is_told_and_a_size_is_not(here: Any, there: Any) -> None:
    (line,) = apart(step_with(here), step_with(here), step_with(there))
    assert f"{here} (mul.Tensor) on ranks 0 and 1 and {there} (mul.Tensor) on rank 2" in line
    assert apart(step_with(size=4), step_with(size=5)) == []


def test_tables_of_whole_numbers_may_differ() -> None:
    tables = torch.arange(4), torch.arange(4) + 4
    assert apart(*(step_with(table=table) for table in tables)) == []


def settings(rate: float, decay: float, optimizer: str = "SGD") -> Numbers:
    """Of two parameters with one rate, of which the first has a decay, too."""
    of_first = {("a", "lr"): repr(rate), ("a", "weight_decay"): repr(decay)}
    names = {("a", "the optimizer"): optimizer, ("b", "the optimizer"): optimizer}
    return Numbers({**of_first, ("b", "lr"): repr(rate), **names}, (), ())


def test_settings_are_told_once_for_all_their_parameters() -> None:
    assert settings(0.1, 0.0).of_updates != settings(0.1, 0.5).of_updates
    ranks = [settings(0.1, 0.0), settings(0.2, 0.0), settings(0.1, 0.0)]
    told = "lr is 0.1 on ranks 0 and 2 and 0.2 on rank 1 (for a and 1 more)"
    assert updates_apart(ranks, settings_alone=True) == [told]
    (told,) = updates_apart([settings(0.1, 0.0), settings(0.1, 0.5)], settings_alone=True)
    assert told == "weight_decay is 0.0 on rank 0 and 0.5 on rank 1 (for a)"
    assert updates_apart([settings(0.1, 0.0)] * 2, settings_alone=True) == []


def test_of_another_optimizer_no_settings_are_told() -> None:
    ranks = [settings(0.1, 0.0), settings(0.2, 0.5, "Adam")]
    (told,) = updates_apart(ranks, settings_alone=True)
    assert told.startswith("the optimizer is SGD on rank 0 and Adam on rank 1")


def test_what_comes_with_a_step_is_compared_where_it_is_a_number_at_hand() -> None:
    inputs = [0.5, torch.tensor(2.0), torch.ones(3), torch.ones((), device="meta")]
    found = values_of({"lr": 0, "clip": 1, "weights": 2, "on a card": 3}, inputs)
    assert found == {"lr": "0.5", "clip": "2.0"}


def test_three_differences_are_told_and_how_many_more_there_are() -> None:
    assert first_few(["a", "b", "c"]) == "a; b; c"
    assert first_few(["a", "b", "c", "d", "e"]) == "a; b; c; and 2 more"


def test_a_mesh_is_whole_where_its_two_groups_make_all_ranks() -> None:
    """Two rows of four: what was summed along both is the same on all eight."""
    groups = {"row": Ranks(range(4)), "column": Ranks({0, 4})}
    graph = fx.Graph()
    param, value = graph.placeholder("w"), graph.placeholder("x")
    for group in groups:
        begun = graph.call_function(c10d.all_reduce.default, (value, "sum", group))
        value = graph.call_function(c10d.wait_tensor.default, (begun,))
    graph.call_function(aten.copy_.default, (param, value))
    graph.output(())
    inputs = (StepInput("w", "w", Role.PARAM), StepInput("x", "x", Role.BATCH))
    step = StepGraph(fx.GraphModule({}, graph), inputs, {})
    world = Ranks(range(8))
    assert same_on(step, 0, world, groups.__getitem__) == {"w": world}

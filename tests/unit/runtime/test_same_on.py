"""Which ranks have to have the same parameter follows from what its update is made of."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn

from cotrain_compile.dataflow import Role
from cotrain_compile.distribute.replicas import Ranks, first_apart, same_on
from cotrain_compile.distribute.same_numbers import numbers_of, updates_apart
from cotrain_compile.graph import StepGraph, StepInput

aten, c10d = torch.ops.aten, torch.ops._c10d_functional
# Two shards, each on two ranks, as rank 0 of four sees them.
GROUPS = {"all": Ranks(range(4)), "shards": Ranks({0, 1}), "replicas": Ranks({0, 2})}

Build = Callable[[fx.Graph, fx.Node, fx.Node], fx.Node]


def wait(graph: fx.Graph, begun: fx.Node) -> fx.Node:
    return graph.call_function(c10d.wait_tensor.default, (begun,))


def all_reduced(graph: fx.Graph, value: fx.Node, group: str) -> fx.Node:
    return wait(graph, graph.call_function(c10d.all_reduce.default, (value, "sum", group)))


def scattered(graph: fx.Graph, value: fx.Node, group: str) -> fx.Node:
    begun = c10d.reduce_scatter_tensor.default
    return wait(graph, graph.call_function(begun, (value, "sum", 2, group)))


def gathered(graph: fx.Graph, value: fx.Node, group: str) -> fx.Node:
    begun = c10d.all_gather_into_tensor.default
    return wait(graph, graph.call_function(begun, (value, 2, group)))


def sum_of(graph: fx.Graph, *values: fx.Node) -> fx.Node:
    return graph.call_function(aten.add.Tensor, values)


def step_of(
    update: Build, role: Role = Role.PARAM, batch_value: Any = None, table: Tensor | None = None
) -> StepGraph:
    """A step that adds what `update` makes of a parameter and a batch to the parameter."""
    graph = fx.Graph()
    param, batch = graph.placeholder("w"), graph.placeholder("x")
    batch.meta["val"] = batch_value
    new = sum_of(graph, param, update(graph, param, batch))
    graph.call_function(aten.copy_.default, (param, new))
    graph.output(())
    inputs = (StepInput("w", "w", role), StepInput("x", "x", Role.BATCH))
    root = nn.Module()
    root.register_buffer("table", table)
    return StepGraph(fx.GraphModule(root, graph), inputs, {})


def found(*args: Any, **kwargs: Any) -> dict[str, Ranks]:
    """What ranks compare of a step that `step_of` makes."""
    return same_on(step_of(*args, **kwargs), 0, GROUPS["all"], GROUPS.__getitem__)


@pytest.mark.parametrize(
    ("what", "update", "ranks"),
    [
        ("replicas", lambda g, w, x: all_reduced(g, sum_of(g, w, x), "all"), "all"),
        ("nothing exchanged", lambda g, w, x: sum_of(g, w, x), None),
        ("parts", lambda g, w, x: scattered(g, x, "all"), None),
        (
            "parts of two",
            lambda g, w, x: all_reduced(g, scattered(g, x, "shards"), "replicas"),
            "replicas",
        ),
        (
            "a whole gathered from such parts",
            lambda g, w, x: all_reduced(
                g, scattered(g, sum_of(g, gathered(g, w, "shards"), x), "shards"), "replicas"
            ),
            "replicas",
        ),
        (
            "a norm over both dimensions of a mesh",
            lambda g, w, x: all_reduced(g, all_reduced(g, x, "replicas"), "shards"),
            "all",
        ),
        ("one group alone", lambda g, w, x: all_reduced(g, x, "shards"), "shards"),
        ("own beside shared", lambda g, w, x: sum_of(g, all_reduced(g, x, "all"), x), None),
    ],
)
def test_a_parameter_is_the_same_where_all_that_updates_it_is(
    what: str, update: Any, ranks: str | None
) -> None:
    assert found(update) == ({"w": GROUPS[ranks]} if ranks else {}), what


def test_what_an_update_draws_by_chance_is_a_rank_s_own() -> None:
    def with_noise(graph: fx.Graph, param: fx.Node, batch: fx.Node) -> fx.Node:
        noise = graph.call_function(aten.rand_like.default, (param,))
        return sum_of(graph, all_reduced(graph, batch, "all"), noise)

    assert found(with_noise) == {}


@pytest.mark.parametrize(
    ("value", "is_same"),
    [
        (0.5, True),
        (torch.ones(()), True),
        (torch.ones(2), False),
        (torch.ones((), device="meta"), False),
    ],
)
def test_a_number_that_comes_with_the_batch_is_the_same_if_it_is_compared(
    value: Any, is_same: bool
) -> None:
    """As what gradients are clipped to, once that has changed; those on a card are not read."""

    def clipped(graph: fx.Graph, param: fx.Node, number: fx.Node) -> fx.Node:
        exchanged = all_reduced(graph, param, "all")
        return graph.call_function(aten.mul.Tensor, (exchanged, number))

    assert found(clipped, batch_value=value) == ({"w": GROUPS["all"]} if is_same else {})


def by_a_table(graph: fx.Graph, param: fx.Node, batch: fx.Node) -> fx.Node:
    exchanged = all_reduced(graph, batch, "all")
    return graph.call_function(aten.mul.Tensor, (exchanged, graph.get_attr("table")))


@pytest.mark.parametrize("count", [2, 100])
def test_a_table_of_fractions_is_compared_and_so_the_same(count: int) -> None:
    """As that of a quantized state, or of weights by layer; one of offsets is a rank's own."""
    table = torch.rand(count)
    assert found(by_a_table, table=table) == {"w": GROUPS["all"]}
    assert found(by_a_table, table=torch.arange(count)) == {}
    other = table.clone()
    other[-1] = -1.0
    here, there, same = (
        numbers_of(step_of(by_a_table, table=each)) for each in (table, other, table.clone())
    )
    assert here.of_updates == same.of_updates != there.of_updates
    (told,) = updates_apart([here, there, same], settings_alone=False)
    assert "-1.0" in told if count == 2 else f"a table of {count} numbers (" in told


def test_running_statistics_are_not_compared() -> None:
    assert found(lambda g, w, x: all_reduced(g, x, "all"), Role.BUFFER) == {}


def test_parts_that_differ_are_told_by_the_ranks_that_share_them() -> None:
    on = {"w": [[0, 2], [1, 3], [0, 2], [1, 3]]}
    assert first_apart([{"w": 5}, {"w": 7}, {"w": 5}, {"w": 7}], on, range(4)) is None
    assert first_apart([{"w": 5}, {"w": 7}, {"w": 5}, {"w": 8}], on, range(4)) == ("w", 1, [3])

"""What calls that look alike cost is found once, and never taken for what another call costs."""

from __future__ import annotations

from collections.abc import Iterator
from unittest import mock

import pytest
import torch
from torch import Tensor, fx
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from cotrain_compile.extract import works
from cotrain_compile.extract.op_costs import computing_dtype, cost_of, kind_of_op, scratch_bytes
from cotrain_compile.extract.works import FoundWork, Works
from cotrain_compile.graph.collectives import is_wait
from cotrain_compile.machine.op_classes import OpKind

aten = torch.ops.aten


@pytest.fixture(autouse=True)
def fake() -> Iterator[None]:
    with FakeTensorMode():
        yield


def of_each(*calls: object) -> list[fx.Node]:
    """The nodes of functions without arguments, each called on tensors of 8 x 8."""

    def all_of(x: Tensor, y: Tensor) -> list[Tensor]:
        return [call(x, y) for call in calls]  # type: ignore[operator]

    graph = make_fx(all_of)(torch.empty(8, 8), torch.empty(8, 8)).graph
    return [node for node in graph.nodes if node.op == "call_function"]


def found_one_by_one(nodes: list[fx.Node]) -> list[FoundWork]:
    found = []
    for node in nodes:
        assert not is_wait(node)
        cost = cost_of(node)
        kind = kind_of_op(node, cost.flops) if cost.bytes_moved else OpKind.UNSAID
        found.append(FoundWork(cost, scratch_bytes(node), computing_dtype(node, cost.flops), kind))
    return found


def test_calls_that_look_alike_are_looked_at_once() -> None:
    nodes = of_each(lambda x, y: x @ y, lambda x, y: y @ x)
    known = Works()
    with mock.patch.object(works, "cost_of", wraps=cost_of) as counted:
        found = [known.of(node, is_free=False) for node in nodes]
    assert counted.call_count == 1
    assert found == found_one_by_one(nodes)
    assert found[0].cost.flops == 2 * 8**3


def test_calls_that_differ_in_anything_are_not_taken_for_each_other() -> None:
    index = torch.empty(4, dtype=torch.int64)
    halves = torch.empty(8, 8, dtype=torch.bfloat16)
    nodes = of_each(
        lambda x, y: x @ y,
        lambda x, y: x @ y[:, :4],  # another size
        lambda x, y: x @ x,  # one factor, which is read once
        lambda x, y: halves @ halves,  # another dtype
        lambda x, y: aten.index_put(x, [index], y[:4], False),
        lambda x, y: aten.index_put(x, [index], y[:4], True),  # a flag: each element is read, too
        lambda x, y: aten.add(x, y),
        lambda x, y: aten.add(x, y[:1].expand(8, 8)),  # other strides: a row is read once
        lambda x, y: aten.add(x, y, alpha=2),
    )
    known = Works()
    assert [known.of(node, is_free=False) for node in nodes] == found_one_by_one(nodes)
    costs = {node.name: known.of(node, is_free=False).cost for node in nodes}
    assert costs["index_put"].bytes_moved < costs["index_put_1"].bytes_moved
    assert costs["add"].bytes_moved > costs["add_1"].bytes_moved


def test_a_view_is_free_beside_a_call_of_the_same_op() -> None:
    (node,) = of_each(lambda x, y: aten.add(x, y))
    known = Works()
    assert known.of(node, is_free=False).cost.bytes_moved
    assert not known.of(node, is_free=True).cost.bytes_moved

"""Updates in lock step leave the bits of updates one by one, in no more than the step's peak."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn

import cotrain_compile
from cotrain_compile.backends.eager import lock_step
from cotrain_compile.backends.eager.calls import AlikeOps
from cotrain_compile.runtime import bound_ops
from cotrain_compile.runtime.bound_ops import bound, list_op
from tests.graph.exactness.test_exactness import assert_bitwise_equal
from tests.support.steps import OPTIMIZERS, Case, Step, check_peak, cotrain, train, train_unplaced

aten = torch.ops.aten
DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
NUMBERS = (0.9, 0.0010000000000000009, -1e-8, 1, 0.5)


def awkward(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Numbers of both signs and all sizes, zeros, and what is not finite."""
    found = torch.randn(shape) * 10.0 ** torch.randint(-30, 30, shape)
    if found.numel() > 8:
        found.view(-1)[:6] = torch.tensor([0.0, -0.0, torch.inf, -torch.inf, torch.nan, 1.0])
    return found.to(dtype)


def arguments_of(target: Any, number: float, graph: fx.Graph) -> list[tuple[Any, ...]]:
    """The ways to call `target`: `x`, `y`, `z` have one shape, `scale` is a single number."""
    x, y, z, scale = (graph.placeholder(name) for name in ("x", "y", "z", "scale"))
    match str(target):
        case "aten.lerp.Scalar":
            return [(x, y, number)]
        case "aten.pow.Scalar":
            return [(number, x)]
        case "aten.pow.Tensor_Scalar" | "aten.rsub.Scalar":
            return [(x, number)]
        case "aten.addcmul.default" | "aten.addcdiv.default":
            return [(x, y, z)]
        case "prims.fma.default":
            return [(x, number, z), (x, y, z), (x, scale, z)]
        case "aten.maximum.default" | "aten.copy_.default":
            return [(x, y)]
        case _ if "y" in (a.name.replace("other", "y") for a in target._schema.arguments):
            return [(x, y), (x, scale), (x, number)]
        case _:
            return [(x,)]


def operator(name: str) -> Any:
    namespace, packet, overload = name.split(".")
    return getattr(getattr(getattr(torch.ops, namespace), packet), overload)


def same_bits(found: Tensor, expected: Tensor) -> bool:
    same_type = (found.dtype, found.shape) == (expected.dtype, expected.shape)
    as_bytes = [value.contiguous().view(-1).view(torch.uint8) for value in (found, expected)]
    return same_type and torch.equal(*as_bytes)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", sorted({**bound_ops._FOREACH, **bound_ops._OF_TENSORS}))
def test_a_list_op_has_the_bits_of_the_op(name: str, dtype: torch.dtype) -> None:
    if name == "prims.fma.default" and not hasattr(torch.ops.prims, "fma"):
        pytest.skip("torch 2.11 has none")
    torch.manual_seed(0)
    shapes, target = [(5, 7), (64,), (), (1,)], operator(name)
    for number in NUMBERS:
        for way in range(len(arguments_of(target, number, fx.Graph()))):
            nodes, values = list[fx.Node](), dict[fx.Node, Any]()
            for shape in shapes:
                graph = fx.Graph()
                arguments = arguments_of(target, number, graph)[way]
                for node in graph.find_nodes(op="placeholder"):
                    values[node] = awkward(() if node.name == "scale" else shape, dtype)
                    node.meta["val"] = values[node]
                node = graph.call_function(target, arguments)
                own = {n: v.clone() for n, v in values.items() if n.graph is graph}
                values[node] = node.meta["val"] = bound(node)(own)
                nodes.append(node)
            columns = list(zip(*(node.args for node in nodes), strict=True))
            given = [
                [values[n] for n in column] if isinstance(column[0], fx.Node) else column[0]
                for column in columns
            ]
            for found, node in zip(list_op(nodes)(*given), nodes, strict=True):
                assert same_bits(found, values[node]), (node.args, values[node].shape)


def test_what_ops_make_of_constants_is_made_for_each() -> None:
    graph = fx.Graph()
    nodes = [graph.call_function(aten.full.default, ([2], 0.5)) for _ in range(3)]
    made = list_op(nodes)([2], 0.5)
    assert [value.tolist() for value in made] == [[0.5, 0.5]] * 3
    assert len({value.data_ptr() for value in made}) == 3


def deep(dtype: torch.dtype, rows: int = 64) -> Case:
    """Many small layers of one shape. With many rows its peak is made of activations."""

    def make_model() -> nn.Module:
        layers = [nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8), nn.Tanh()) for _ in range(4)]
        return nn.Sequential(*layers).to(dtype)

    def make_batch() -> tuple[Tensor, ...]:
        return (torch.randn(rows, 8).to(dtype),)

    return Case(make_model, make_batch, lambda model, x: model(x).square().mean())


@pytest.mark.parametrize(
    ("optimizer", "dtype"),
    [
        ("adamw", torch.float32),
        pytest.param("adamw-groups", torch.bfloat16, marks=pytest.mark.long),
        pytest.param("adam", torch.float64, marks=pytest.mark.long),
        *(pytest.param(o, torch.float32, marks=pytest.mark.long) for o in sorted(OPTIMIZERS)),
    ],
)
def test_a_step_in_lock_step_has_the_bits_of_the_captured_one(
    optimizer: str, dtype: torch.dtype
) -> None:
    def check(step: Step) -> None:
        check_peak(step)
        placed = cotrain_compile.inspect(step)
        calls = placed._program._calls
        in_rows = {node.name for call in calls if call.rows for node in call.nodes}
        updates = placed.problem.dataflow.updates
        of_updates = {name for group in updates for name in group.ops}
        most = 2 * len(in_rows & of_updates) > len(of_updates)
        assert most or optimizer in ("muon", "adafactor")

    case = deep(dtype)
    placed = train(case, OPTIMIZERS[optimizer], cotrain(policy="resident"), check)
    torch._dynamo.reset()
    assert_bitwise_equal(placed, train_unplaced(case, OPTIMIZERS[optimizer]))


@pytest.mark.parametrize("optimizer", ["adamw", pytest.param("rmsprop", marks=pytest.mark.long)])
def test_a_peak_in_the_updates_is_that_of_the_plan(optimizer: str) -> None:
    """Up to there updates run as they are planned: in another order there would be another peak."""

    def check(step: Step) -> None:
        check_peak(step)
        calls = cotrain_compile.inspect(step)._program._calls
        in_rows.append(any(call.rows for call in calls))

    in_rows = list[bool]()
    train(deep(torch.float32, rows=1), OPTIMIZERS[optimizer], cotrain(policy="resident"), check)
    assert all(in_rows)


def test_with_little_room_fewer_updates_run_together(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lock_step, "MOST_BYTES", 3000)
    rows_of_calls = list[Sequence[AlikeOps]]()

    def check(step: Step) -> None:
        check_peak(step)
        calls = cotrain_compile.inspect(step)._program._calls
        rows_of_calls.extend(call.rows for call in calls if call.rows)

    train(deep(torch.float32), OPTIMIZERS["adamw"], cotrain(policy="resident"), check, steps=1)
    assert len(rows_of_calls) > 1
    for rows in rows_of_calls:
        made = [sum(n.meta["val"].nbytes for n in row.nodes) for row in rows if not row.copies]
        assert max(made) <= 3000

"""Flops and bytes of ops, each class against a count by hand; what nobody knows is said."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils.flop_counter import flop_registry

from cotrain_compile.extract.op_costs import OpCost, computing_dtype, cost_of, kind_of_op, op_name
from cotrain_compile.machine.op_classes import OpKind
from tests.support.blur import blur

aten = torch.ops.aten
Shape = tuple[int, ...]


def node_of(function: Callable[..., Any], *arguments: Any, name: str = "") -> fx.Node:
    """The node of the one op that `function` calls, or of the one called `name`."""
    graph = make_fx(function)(*arguments).graph
    calls = [
        n
        for n in graph.nodes
        if n.op == "call_function" and isinstance(n.target, torch._ops.OpOverload)
    ]
    found: list[fx.Node] = [n for n in calls if name in ("", op_name(n.target)[len("aten::") :])]
    return found[0]


@pytest.fixture(autouse=True)
def fake() -> Any:
    with FakeTensorMode() as mode:
        yield mode


def empty(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.empty(shape, dtype=dtype)


# Products.


@pytest.mark.parametrize(
    ("left", "right", "flops"),
    [
        ((24, 8), (4, 8, 16), 2 * 24 * 8 * 16),  # each row meets one of four experts
        ((4, 24, 8), (8, 40), 2 * 24 * 8 * 40),  # each column does
        ((24, 40), (40, 16), 2 * 24 * 40 * 16),  # the gradient of the experts: a sum over rows
        ((4, 24, 8), (4, 8, 16), 2 * 4 * 24 * 8 * 16),
    ],
    ids=["rows", "columns", "sums", "stacks"],
)
def test_a_grouped_product_costs_what_its_rows_meet(left: Shape, right: Shape, flops: int) -> None:
    offsets = None if len(left) == len(right) == 3 else empty(4, dtype=torch.int32)
    node = node_of(lambda a, b: aten._grouped_mm(a, b, offsets), empty(*left), empty(*right))
    assert cost_of(node).flops == flops


def test_a_product_runs_at_the_rate_of_its_factors() -> None:
    def scaled(a: Tensor, b: Tensor, one: Tensor) -> Tensor:
        return torch._scaled_mm(a, b.t(), one, one, out_dtype=torch.bfloat16)

    eight = [empty(*s, dtype=torch.float8_e4m3fn) for s in ((32, 64), (16, 64))]
    node = node_of(scaled, *eight, torch.ones(()), name="_scaled_mm")
    flops = cost_of(node).flops
    assert flops == 2 * 32 * 64 * 16
    assert computing_dtype(node, flops) == "float8_e4m3fn"


# Attention: batch 2, 8 heads on 4 keys and values, 6 queries on 10 keys, widths 16 and 32.

FORWARD, BACKWARD = (16 + 32), (3 * 16 + 2 * 32)  # widths of two products, and of five


def heads(queries: int) -> list[Tensor]:
    return [empty(2, 8, queries, 16), empty(2, 4, 10, 16), empty(2, 4, 10, 32)]


@pytest.mark.parametrize("kind", ["flash_attention", "flash_attention_for_cpu", "cudnn_attention"])
def test_attention_costs_two_products_and_its_backward_five(kind: str) -> None:
    forward, backward = (
        torch.ops.aten.__getattr__(f"_scaled_dot_product_{kind}{way}").default
        for way in ("", "_backward")
    )
    node = fx.Graph().call_function(forward, tuple(heads(6)))
    node.meta["val"] = empty(2, 8, 6, 32)
    assert cost_of(node).flops == 2 * 2 * 8 * 6 * 10 * FORWARD
    node = fx.Graph().call_function(backward, (empty(2, 8, 6, 32), *heads(6)))
    node.meta["val"] = tuple(heads(6))
    assert cost_of(node).flops == 2 * 2 * 8 * 6 * 10 * BACKWARD


def test_causal_attention_skips_what_is_above_the_diagonal() -> None:
    """Of queries i = 1 .. 10 each meets i keys: 55 of 100 pairs."""
    node = fx.Graph().call_function(
        aten._scaled_dot_product_flash_attention.default, (*heads(10), 0.0, True)
    )
    node.meta["val"] = empty(2, 8, 10, 32)
    assert cost_of(node).flops == 2 * 2 * 8 * 55 * FORWARD


def test_a_kernel_below_has_its_heads_behind_its_positions() -> None:
    turned = [t.transpose(1, 2) for t in heads(6)]
    node = fx.Graph().call_function(
        aten._flash_attention_forward.default, (*turned, None, None, 6, 10, 0.0, False, False)
    )
    node.meta["val"] = empty(2, 6, 8, 32)
    assert cost_of(node).flops == 2 * 2 * 8 * 6 * 10 * FORWARD


def test_packed_sequences_count_as_if_all_were_as_long_as_the_longest() -> None:
    rows = [empty(14, 8, 16), empty(14, 4, 16), empty(14, 4, 32)]
    ends = empty(3, dtype=torch.int32)  # two sequences
    node = fx.Graph().call_function(
        aten._flash_attention_forward.default, (*rows, ends, ends, 10, 10, 0.0, False, False)
    )
    node.meta["val"] = empty(14, 8, 32)
    assert cost_of(node).flops == 2 * 2 * 8 * 10 * 10 * FORWARD


def test_attention_of_plain_ops_costs_its_products() -> None:
    def both(q: Tensor, k: Tensor, v: Tensor) -> Any:
        return aten._scaled_dot_product_attention_math(q, k, v)[0]

    same = [empty(2, 8, 10, 16, dtype=torch.float32) for _ in range(3)]
    calls = [n for n in make_fx(both)(*same).graph.nodes if n.op == "call_function"]
    flops = [cost_of(n).flops for n in calls if isinstance(n.target, torch._ops.OpOverload)]
    assert sum(flops) == 2 * 2 * 8 * 10 * 10 * (16 + 16)


# Convolutions: 3 x 5 images of 8 channels, kernels of 3 x 3, 12 channels out, batch 2.


@pytest.mark.parametrize("groups", [1, 4])
@pytest.mark.parametrize("transposed", [False, True])
def test_a_convolution_costs_a_product_a_place(groups: int, transposed: bool) -> None:
    """Each gradient as much as the forward, in groups as well."""

    def forward(x: Tensor, w: Tensor) -> Any:
        return aten.convolution(x, w, None, [1, 1], [0, 0], [1, 1], transposed, [0, 0], groups)

    def backward(grad: Tensor, x: Tensor, w: Tensor) -> Any:
        shape = [[1, 1], [0, 0], [1, 1], transposed, [0, 0], groups, [True, True, False]]
        return aten.convolution_backward(grad, x, w, None, *shape)

    x = empty(2, 8, 3, 5)
    weight = empty(8, 12 // groups, 3, 3) if transposed else empty(12, 8 // groups, 3, 3)
    places = 2 * 3 * 5 if transposed else 2 * 1 * 3
    by_hand = 2 * places * 9 * 8 * 12 // groups
    node = node_of(forward, x, weight)
    assert cost_of(node).flops == by_hand
    grad = empty(*node.meta["val"].shape)
    assert cost_of(node_of(backward, grad, x, weight)).flops == 2 * by_hand


# Transforms.


def test_a_transform_costs_five_n_log_n_and_a_real_one_half() -> None:
    x = empty(6, 64, dtype=torch.float32)
    by_hand = 5 * 6 * 64 * 6
    spectrum = node_of(torch.fft.fft, x.to(torch.complex64), name="_fft_c2c")
    assert cost_of(spectrum).flops == by_hand
    assert cost_of(node_of(torch.fft.rfft, x, name="_fft_r2c")).flops == by_hand // 2
    back = node_of(torch.fft.irfft, empty(6, 33, dtype=torch.complex64), name="_fft_c2r")
    assert cost_of(back).flops == by_hand // 2


def test_distances_cost_three_flops_a_dimension_of_a_pair() -> None:
    points = [empty(5, 16, dtype=torch.float32), empty(7, 16, dtype=torch.float32)]
    node = node_of(lambda a, b: aten._cdist_forward(a, b, 2.0, 2), *points)
    assert cost_of(node).flops == 3 * 5 * 7 * 16


# Bytes: a table of 1000 rows of 32 bfloat16, 10 of them wanted.

TABLE, ROWS, INDICES = 1000 * 32 * 2, 10 * 32 * 2, 10 * 8


def rows() -> tuple[Tensor, Tensor]:
    return empty(1000, 32), empty(10, dtype=torch.int64)


def test_a_look_up_reads_rows_and_no_table() -> None:
    table, indices = rows()
    for look_up in (aten.embedding, lambda t, i: t[i], lambda t, i: torch.index_select(t, 0, i)):
        assert cost_of(node_of(look_up, table, indices)) == OpCost(0, INDICES + 2 * ROWS)


def test_the_gradient_of_a_table_is_zeros_and_added_rows() -> None:
    def gradient(grad: Tensor, indices: Tensor) -> Any:
        return aten.embedding_dense_backward(grad, indices, 1000, -1, False)

    node = node_of(gradient, empty(10, 32), rows()[1])
    assert cost_of(node).bytes_moved == TABLE + INDICES + 3 * ROWS


def test_a_loss_picks_an_element_of_each_row_and_its_gradient_writes_all() -> None:
    logits, classes = empty(10, 1000), empty(10, dtype=torch.int64)
    forward = node_of(lambda x, y: aten.nll_loss_forward(x, y, None, 1, -100), logits, classes)
    results = 2 * 2  # the loss and the sum of weights
    assert cost_of(forward).bytes_moved == 2 * 10 * 8 + results
    assert kind_of_op(forward, 0) is OpKind.REDUCTION

    def gradient(grad: Tensor, x: Tensor, y: Tensor, weight: Tensor) -> Any:
        return aten.nll_loss_backward(grad, x, y, None, 1, -100, weight)

    backward = node_of(gradient, empty(), logits, classes, empty())
    numbers = 2 * 2  # the loss's gradient and the sum of weights
    assert cost_of(backward).bytes_moved == 10 * 8 + logits.nbytes + numbers
    assert kind_of_op(backward, 0) is OpKind.POINTWISE


@pytest.mark.parametrize("has_mask", [False, True])
def test_attention_that_reads_a_mask_is_of_another_kind(has_mask: bool) -> None:
    q = empty(2, 4, 128, 64)
    mask = empty(2, 4, 128, 128) if has_mask else None
    name = "_scaled_dot_product_efficient_attention"

    def attend(q: Tensor, *mask: Tensor) -> Any:
        bias = mask[0] if mask else None
        return aten._scaled_dot_product_efficient_attention(q, q, q, bias, True)

    node = node_of(attend, q, *([] if mask is None else [mask]), name=name)
    expected = OpKind.MASKED_ATTENTION if has_mask else OpKind.ATTENTION
    assert kind_of_op(node, cost_of(node).flops) is expected


def test_what_is_scattered_into_is_copied() -> None:
    table, indices = rows()
    values = empty(10, 32)
    put = node_of(lambda t, i, v: aten.index_put(t, [i], v), table, indices, values)
    assert cost_of(put).bytes_moved == 2 * TABLE + INDICES + 2 * ROWS
    added = node_of(lambda t, i, v: aten.index_put(t, [i], v, True), table, indices, values)
    assert cost_of(added).bytes_moved == 2 * TABLE + INDICES + 3 * ROWS
    wide = empty(10, 32, dtype=torch.int64)
    scattered = node_of(lambda t, i, v: t.scatter_add(0, i, v), table, wide, values)
    assert cost_of(scattered).bytes_moved == 2 * TABLE + 10 * 32 * 8 + 3 * ROWS
    gathered = node_of(lambda t, i: t.gather(0, i), table, wide)
    assert cost_of(gathered).bytes_moved == 10 * 32 * 8 + 2 * ROWS


def test_a_sort_goes_through_keys_and_positions_once_a_byte_of_the_key() -> None:
    node = node_of(lambda x: torch.sort(x), empty(100, dtype=torch.float32))
    assert cost_of(node) == OpCost(0, 4 * 2 * 100 * (4 + 8))
    largest = node_of(lambda x: torch.topk(x, 7), empty(100, dtype=torch.float32))
    assert cost_of(largest) == OpCost(0, 400 + 7 * (4 + 8))


def test_scans_and_norms_go_through_their_memory() -> None:
    x = empty(4, 8, 6, 6, dtype=torch.float32)
    nbytes, channel = 4 * 8 * 36 * 4, 8 * 4
    assert cost_of(node_of(lambda t: t.cumsum(-1), x)) == OpCost(0, 2 * nbytes)
    layer = node_of(lambda t: F.layer_norm(t, (6,)), x, name="native_layer_norm")
    assert cost_of(layer) == OpCost(0, 2 * nbytes + 2 * (4 * 8 * 6) * 4)
    # Sums over the batch come first: the input is read twice.
    batch = node_of(lambda t: aten.native_batch_norm(t, None, None, None, None, True, 0.1, 1e-5), x)
    assert cost_of(batch) == OpCost(0, 3 * nbytes + 2 * channel)


# What nobody knows.


def test_an_op_of_others_and_a_factorisation_are_unknown_and_their_bytes_are_not() -> None:
    x = empty(8, 8, dtype=torch.float32)
    assert cost_of(node_of(blur, x)) == OpCost(0, 2 * 8 * 8 * 4, is_known=False)
    assert not cost_of(node_of(lambda t: torch.linalg.qr(t)[0], x)).is_known
    for known in (torch.exp, torch.softmax, torch.linalg.vector_norm, torch.cumprod):
        arguments: Sequence[Any] = (x, 0) if known in (torch.softmax, torch.cumprod) else (x,)
        assert cost_of(node_of(known, *arguments)).is_known


def test_a_formula_given_to_torch_makes_an_op_known(monkeypatch: pytest.MonkeyPatch) -> None:
    def formula(x: Tensor, *, out_val: Tensor) -> int:
        return 9 * x.numel() + 0 * out_val.numel()

    monkeypatch.setitem(flop_registry, torch.ops.cotrain_tests.blur, formula)
    node = node_of(blur, empty(8, 8, dtype=torch.float32))
    assert cost_of(node) == OpCost(9 * 8 * 8, 2 * 8 * 8 * 4)

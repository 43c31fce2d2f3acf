"""Attention by FlashAttention's own package: a step with it trains, and its ops are known.

The package is `tests/support/flash_package`; for a card it is in `test_fake_cuda.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from cotrain_compile.dataflow import Dataflow, Role
from cotrain_compile.entry.tracing import trace
from tests.support import flash_package

pytestmark = pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")

WIDTH, HEADS, TOKENS, SEQUENCES = 16, 2, 8, 2
HEAD = WIDTH // HEADS
STARTS = torch.tensor([0, 5, SEQUENCES * TOKENS], dtype=torch.int32)
LONGEST = SEQUENCES * TOKENS - 5


def dense(parts: Tensor, **kwargs: Any) -> Tensor:
    q, k, v = parts.unbind(2)
    return flash_package.flash_attn_func(q, k, v, causal=True, **kwargs)


def together(parts: Tensor, **kwargs: Any) -> Tensor:
    return flash_package.flash_attn_qkvpacked_func(parts, causal=True, **kwargs)


def packed(parts: Tensor, **kwargs: Any) -> Tensor:
    """Two sequences of unequal length; the starts of queries are those of keys."""
    q, k, v = (part.flatten(0, 1) for part in parts.unbind(2))
    mixed = flash_package.flash_attn_varlen_func(
        q, k, v, STARTS, STARTS, LONGEST, LONGEST, causal=True, **kwargs
    )
    return mixed.unflatten(0, (SEQUENCES, TOKENS))  # type: ignore[no-any-return]


Attention = Callable[..., Tensor]
KINDS = (dense, together, packed)


def training(attention: Attention, **kwargs: Any) -> tuple[Callable[..., Tensor], tuple[Any, ...]]:
    torch.manual_seed(0)
    inputs, output = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
    optimizer = torch.optim.AdamW([*inputs.parameters(), *output.parameters()])

    def step(x: Tensor) -> Tensor:
        optimizer.zero_grad()
        mixed = attention(inputs(x).unflatten(-1, (3, HEADS, HEAD)), **kwargs)
        loss: Tensor = output(mixed.flatten(2)).square().mean()
        loss.backward()
        optimizer.step()
        return loss

    return step, (torch.randn(SEQUENCES, TOKENS, WIDTH),)


def losses(attention: Attention, policy: str = "") -> list[float]:
    torch._dynamo.reset()
    step, args = training(attention)
    if policy:
        options: dict[str, Any] = {"policy": policy, "host_kernels": "captured", "quiet": True}
        step = torch.compile(step, backend="cotrain", options=options)
    return [step(*args).item() for _ in range(3)]


@pytest.mark.parametrize(
    "attention", [pytest.param(k, marks=() if k is packed else pytest.mark.long) for k in KINDS]
)
def test_a_step_with_it_trains_as_in_eager(attention: Attention) -> None:
    expected = losses(attention)
    assert expected[2] < expected[0]
    resident = losses(attention, "resident")
    assert resident == pytest.approx(expected, rel=1e-4)
    assert losses(attention, "streamed") == resident


@pytest.mark.parametrize("attention", KINDS)
def test_its_ops_are_priced_and_what_their_backward_takes_is_planned(attention: Attention) -> None:
    dataflow = trace(lambda: training(attention))
    forward, backward = ops_of(dataflow)
    sequences, longest = (SEQUENCES, TOKENS) if attention is not packed else (2, LONGEST)
    pairs = sequences * HEADS * longest * (longest + 1) // 2  # each is as long as the longest
    assert forward.flops == 4 * pairs * HEAD
    assert backward.flops == 10 * pairs * HEAD
    assert backward.cost_is_known
    element = SEQUENCES * TOKENS * WIDTH * 4
    # Five are read and three written, and not read before; with sums of rows and the state.
    assert 8 * element < backward.bytes_moved < 11 * element
    (scratch,) = (b for b in dataflow.buffers if b.role is Role.WORKSPACE)
    assert scratch.name in backward.writes
    assert scratch.nbytes == element


def test_a_window_leaves_out_what_is_behind_it() -> None:
    forward, _ = ops_of(trace(lambda: training(dense, window_size=(2, 0))))
    pairs = sum(min(row + 1, 3) for row in range(TOKENS))
    assert forward.flops == 4 * SEQUENCES * HEADS * pairs * HEAD


def test_with_dropout_only_its_forward_draws() -> None:
    """The backward is given the state that the forward has drawn from."""
    dropping = trace(lambda: training(dense, dropout_p=0.1))
    drawn = [
        op.target
        for op in dropping.ops
        if any(dropping.buffer[name].role is Role.RNG for name in op.writes)
    ]
    assert drawn == ["flash_attn._flash_attn_forward.default"]


def ops_of(dataflow: Dataflow) -> list[Any]:
    """Forward and backward of attention."""
    return [op for op in dataflow.ops if op.target.startswith("flash_attn.")]

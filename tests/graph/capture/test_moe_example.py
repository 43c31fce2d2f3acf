"""The mixture of experts of `docs/examples` computes what it says, and its step is traced whole."""

from __future__ import annotations

import importlib
from pathlib import Path
from types import ModuleType

import pytest
import torch
import torch.nn.functional as F

import cotrain_compile

transformers = pytest.importorskip("transformers")


@pytest.fixture
def moe(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(Path("docs/examples").resolve()))
    return importlib.import_module("moe")


def test_a_token_is_the_sum_of_its_two_experts_or_dropped_where_they_are_full(
    moe: ModuleType,
) -> None:
    torch.manual_seed(0)
    experts, x = moe.Experts(8, 16), torch.randn(2, 16, 8)
    room = 5  # 1.25 times 16 tokens with two choices among eight experts
    weights, chosen = experts.router(x).softmax(-1).topk(2)
    expected, dropped = torch.zeros_like(x), 0
    for sequence in range(2):
        taken = [0] * 8
        for token in range(16):
            for weight, e in zip(weights[sequence, token], chosen[sequence, token], strict=True):
                expert, row = int(e), x[sequence, token]
                taken[expert] += 1
                if taken[expert] > room:
                    dropped += 1
                    continue
                inner = F.silu(row @ experts.gate[expert]) * (row @ experts.up[expert])
                expected[sequence, token] += weight * (inner @ experts.down[expert])
    assert dropped
    torch.testing.assert_close(experts(x), expected)


def test_the_step_is_traced_with_the_experts_of_each_layer(moe: ModuleType) -> None:
    small = transformers.LlamaConfig(
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
        vocab_size=32,
        use_cache=False,
    )
    traced = cotrain_compile.trace(lambda: moe.training_step(moe.mixture(small), 2, 16))
    updated = [group.param for group in traced.updates]
    assert [name for name in updated if ".mlp." in name] == [
        f"model.layers.0.mlp.{name}" for name in ("gate", "up", "down", "router.weight")
    ]

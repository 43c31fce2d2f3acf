"""Hugging Face models have eager's attention kernel in the trace; a mask they need stays."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn
from torch._dynamo.utils import counters
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
)

from cotrain_compile.capture.dynamo.causal_masks import counts_up
from cotrain_compile.entry.compiled import inspect
from cotrain_compile.entry.tracing import trace_graph
from cotrain_compile.extract.notes import masked_attention
from cotrain_compile.graph import StepGraph

LENGTH = 12
SHAPE: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 64,
    "use_cache": False,
}


def llama() -> nn.Module:
    return LlamaForCausalLM(LlamaConfig(**SHAPE))


def mistral(window: int) -> nn.Module:
    return MistralForCausalLM(MistralConfig(**SHAPE, sliding_window=window))


def job(make: Callable[[], nn.Module], *names: str) -> Callable[[], tuple[Any, Any]]:
    """A step of the model that `make` makes, with these inputs beside its tokens."""

    def build() -> tuple[Any, Any]:
        model = make()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

        def step(tokens: Tensor, given: dict[str, Tensor]) -> Tensor:
            optimizer.zero_grad()
            logits = model(input_ids=tokens, **given).logits
            loss = F.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())
            loss.backward()
            optimizer.step()
            return loss.detach()

        values = {
            "attention_mask": torch.ones(2, LENGTH, dtype=torch.int64),
            "position_ids": torch.arange(LENGTH).repeat(2, 1),
        }
        tokens = torch.arange(2 * LENGTH).view(2, LENGTH)
        return step, (tokens, {name: values[name] for name in names})

    return build


def attention(step: StepGraph) -> fx.Node:
    (node,) = (
        n
        for n in step.nodes
        if "scaled_dot_product" in str(n.target) and "backward" not in str(n.target)
    )
    return node


def has_mask(node: fx.Node) -> bool:
    return node.kwargs.get("attn_mask") is not None


@pytest.mark.parametrize("dynamic", [pytest.param(False, marks=pytest.mark.long), True])
def test_attention_is_causal_and_heads_share_keys_in_the_kernel_as_in_eager(dynamic: bool) -> None:
    step = trace_graph(job(llama), dynamic=dynamic)
    node = attention(step)
    query, key, _, _, is_causal = node.args
    assert isinstance(query, fx.Node)
    assert isinstance(key, fx.Node)
    assert not has_mask(node)
    assert is_causal is True
    assert query.meta["val"].shape[1] == 2 * key.meta["val"].shape[1]
    assert masked_attention(step) == ()


def test_a_window_longer_than_the_sequence_hides_nothing() -> None:
    assert not has_mask(attention(trace_graph(job(lambda: mistral(2 * LENGTH)))))


@pytest.mark.parametrize(
    "build",
    [
        job(llama, "attention_mask"),
        pytest.param(job(llama, "position_ids"), marks=pytest.mark.long),
        pytest.param(job(lambda: mistral(LENGTH // 2)), marks=pytest.mark.long),
    ],
    ids=["padding", "packed sequences", "sliding window"],
)
def test_a_mask_that_may_hide_more_stays_and_a_note_says_so(
    build: Callable[[], tuple[Any, Any]],
) -> None:
    step = trace_graph(build)
    assert has_mask(attention(step))
    (note,) = masked_attention(step)
    assert note.startswith("1 attentions read a mask (the largest has 1.1 KiB")
    assert "neither attention_mask nor position_ids" in note


def test_a_step_has_eagers_numbers_in_one_graph_and_the_plan_has_the_note() -> None:
    losses = []
    for compiles in (True, False):
        torch.manual_seed(0)
        step, (tokens, given) = job(llama)()
        run = torch.compile(step, backend="cotrain") if compiles else step
        losses.append([float(run(tokens, given)) for _ in range(3)])
        if compiles:
            assert counters["stats"]["unique_graphs"] == 1
            assert inspect(run).plan.notes == ()
            run(tokens, {"attention_mask": torch.ones(2, LENGTH, dtype=torch.int64)})
            (note,) = inspect(run).plan.notes
            assert "read a mask" in note
    assert losses[0] == pytest.approx(losses[1], abs=1e-5)


def test_stock_compile_traces_as_ever() -> None:
    trace_graph(job(llama))
    masks: list[bool] = []

    def record(module: fx.GraphModule, inputs: list[Any]) -> Callable[..., Any]:
        del inputs
        calls = module.graph.find_nodes(op="call_function", target=F.scaled_dot_product_attention)
        masks.extend(call.kwargs["attn_mask"] is not None for call in calls)
        return module.forward

    torch.compile(llama(), backend=record)(torch.zeros(2, LENGTH, dtype=torch.int64))
    assert masks == [True]


def traced(positions: Callable[[Tensor], Tensor]) -> fx.Node:
    """The node of what `positions` makes, as Dynamo has it."""
    found: list[fx.Node] = []

    def record(module: fx.GraphModule, inputs: list[Any]) -> Callable[..., Any]:
        del inputs
        (output,) = module.graph.find_nodes(op="output")
        found.append(output.args[0][0])
        return module.forward

    torch.compile(positions, backend=record)(torch.zeros(3, LENGTH, dtype=torch.int64))
    return found[0]


@pytest.mark.parametrize(
    "positions",
    [
        lambda x: torch.arange(x.shape[1]),
        lambda x: (torch.arange(5, 5 + x.shape[1]) + 2).unsqueeze(0).expand(3, -1),
        lambda x: torch.arange(x.shape[1])[None, :].to(torch.int32),
        lambda x: torch.arange(12).view(-1, 12).long() - 1,
    ],
)
def test_positions_counted_up_are_known(positions: Callable[[Tensor], Tensor]) -> None:
    assert counts_up(traced(positions))


@pytest.mark.parametrize(
    "positions",
    [
        lambda x: x + 1,
        lambda x: torch.arange(x.shape[1]) + x,
        lambda x: torch.arange(0, 24, 2),
        lambda x: torch.arange(12) * 2,
        lambda x: torch.arange(12.0),
        lambda x: torch.arange(12).view(3, 4),
        lambda x: torch.arange(12).unsqueeze(-1).expand(12, 3),
        lambda x: torch.arange(24)[::2],
        lambda x: torch.arange(12).flip(0),
        lambda x: torch.arange(12).to(torch.bool),
    ],
)
def test_other_positions_are_not(positions: Callable[[Tensor], Tensor]) -> None:
    assert not counts_up(traced(positions))

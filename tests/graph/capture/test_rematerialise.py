"""Values made again for the backward: same bits, less memory, no random number drawn twice."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

import cotrain_compile
from cotrain_compile.capture.nodes.storages import storage_key
from cotrain_compile.dataflow import Phase
from cotrain_compile.entry.tracing import trace_graph
from cotrain_compile.graph import StepGraph
from cotrain_compile.machine import Tier
from cotrain_compile.runtime.allocations import most_allocated
from tests.graph.exactness.test_exactness import assert_bitwise_equal
from tests.support.captured_steps import TRAININGS, captured
from tests.support.steps import CASES, OPTIMIZERS, Step, cotrain, train_placed, train_unplaced

aten = torch.ops.aten
VIEWS = (aten.detach.default, aten.t.default, aten.view.default)
WIDTH, ROWS, LAYERS = 32, 256, 3


class Block(nn.Module):
    """A perceptron around a skip connection, with eight times its input inside."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.norm, self.dropout = nn.LayerNorm(WIDTH), dropout
        self.widen, self.narrow = nn.Linear(WIDTH, 8 * WIDTH), nn.Linear(8 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        hidden = F.gelu(self.widen(self.norm(x)))
        if self.dropout:
            hidden = F.dropout(hidden, self.dropout)
        return x + self.narrow(hidden)  # type: ignore[no-any-return]


class Stack(nn.Module):
    def __init__(self, apply: Callable[..., Tensor], dropout: float = 0.0) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block(dropout) for _ in range(LAYERS))
        self.apply_layer = apply

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = self.apply_layer(layer, x)
        return x


def plainly(layer: nn.Module, x: Tensor) -> Tensor:
    return layer(x)  # type: ignore[no-any-return]


def keep_products(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    is_product = op is aten.addmm.default
    return CheckpointPolicy.MUST_SAVE if is_product else CheckpointPolicy.PREFER_RECOMPUTE


checkpointed = partial(checkpoint, use_reentrant=False)
selectively = partial(
    checkpointed, context_fn=partial(create_selective_checkpoint_contexts, keep_products)
)


def stack_step(apply: Callable[..., Tensor], dropout: float = 0.0) -> tuple[Step, Tensor]:
    torch.manual_seed(0)
    model = Stack(apply, dropout)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(x: Tensor) -> Tensor:
        loss: Tensor = model(x).pow(2).mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step, torch.randn(ROWS, WIDTH)


def losses(step: Step, x: Tensor, count: int = 3) -> list[Tensor]:
    torch.manual_seed(1)
    return [step(x) for _ in range(count)]


def forward_products_in_backward(graph: StepGraph) -> int:
    return sum(
        node.target is aten.addmm.default and graph.phases[node.name] is Phase.BACKWARD
        for node in graph.nodes
    )


@pytest.mark.parametrize(
    "case",
    ["mlp", *(pytest.param(c, marks=pytest.mark.long) for c in ("gpt2", "conv", "tied"))],
)
def test_what_is_made_again_has_the_same_bits(case: str) -> None:
    kept = train_unplaced(CASES[case], OPTIMIZERS["adamw"])
    torch._dynamo.reset()
    again = train_placed(CASES[case], OPTIMIZERS["adamw"], policy="resident", remat=True)
    assert_bitwise_equal(again, kept)


def test_values_of_each_micro_batch_are_made_again_from_its_own() -> None:
    training = TRAININGS["accumulating"]

    def run(**options: Any) -> list[Tensor]:
        torch.manual_seed(0)
        torch._dynamo.reset()
        model = training.case.make_model()
        batch = training.case.make_batch()
        optimizers = training.make_optimizers(model)
        step = cotrain(**options)(training.make(model, optimizers, training.case.loss_of))
        return [step(*batch) for _ in range(3)]

    assert run(remat=True) == run(remat=False)


def test_a_view_in_the_backward_shows_the_value_made_again() -> None:
    """Else the plan would count the first one to the backward, of which nothing is left there."""
    views = [node for node in captured("checkpointed").step.nodes if node.target in VIEWS]
    assert views
    assert all(storage_key(view) == storage_key(view.args[0]) for view in views)


def test_a_checkpointed_model_keeps_its_saving() -> None:
    step, x = stack_step(checkpointed)
    step(x)
    eager_bytes = most_allocated(lambda: step(x))[1]
    compiled = cotrain(policy="resident")(step)
    compiled(x)
    found = cotrain_compile.inspect(compiled)
    assert found.measured is not None
    held_bytes = sum(b.nbytes for b in found.problem.dataflow.buffers if b.is_input)
    peak_bytes = found.measured.peak_bytes[Tier.DEVICE] - held_bytes
    assert peak_bytes <= 1.03 * eager_bytes
    assert forward_products_in_backward(found.graph) >= LAYERS


def test_a_policy_for_a_checkpoint_is_followed() -> None:
    def traced(apply: Callable[..., Tensor]) -> StepGraph:
        def build() -> tuple[Step, tuple[Tensor]]:
            step, x = stack_step(apply)
            return step, (x,)

        torch._dynamo.reset()
        return trace_graph(build)

    assert forward_products_in_backward(traced(plainly)) == 0
    assert forward_products_in_backward(traced(checkpointed)) == LAYERS
    assert forward_products_in_backward(traced(selectively)) == 0


@pytest.mark.parametrize("remat", [False, True])
def test_dropout_in_a_checkpoint_is_eagers(remat: bool) -> None:
    step, x = stack_step(checkpointed, dropout=0.2)
    expected = losses(step, x)
    step, x = stack_step(checkpointed, dropout=0.2)
    compiled = cotrain(policy="resident", remat=remat)(step)
    torch.testing.assert_close(losses(compiled, x), expected)
    graph = cotrain_compile.inspect(compiled).graph
    drawn = [
        n for n in graph.nodes if torch.Tag.nondeterministic_seeded in getattr(n.target, "tags", ())
    ]
    assert len(drawn) == LAYERS


class Attention(nn.Module):
    """Attention with a skip connection, in float64: eager's numbers in every bit."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.heads, self.dropout = nn.Linear(8, 24).double(), dropout

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.heads(x).unflatten(-1, (3, 2, 4)).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, dropout_p=self.dropout)
        return x + mixed.transpose(1, 2).flatten(2)


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("dropout", [0.0, 0.3])
def test_attention_in_a_checkpoint_is_made_again_where_it_drops_nothing(dropout: float) -> None:
    def run(compile_with: Callable[[Step], Step]) -> tuple[list[Tensor], Step]:
        torch.manual_seed(0)
        layers = nn.ModuleList(Attention(dropout) for _ in range(2))
        optimizer = torch.optim.SGD(layers.parameters(), lr=0.1)

        def step(x: Tensor) -> Tensor:
            for layer in layers:
                x = checkpointed(layer, x)
            loss = x.pow(2).mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            return loss.detach()

        compiled = compile_with(step)
        torch.manual_seed(1)
        found = [compiled(torch.randn(3, 5, 8, dtype=torch.float64)) for _ in range(2)]
        return [*found, *layers.parameters(), torch.get_rng_state()], compiled

    expected, _ = run(lambda step: step)
    found, compiled = run(cotrain(policy="resident", remat=False))
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
    graph = cotrain_compile.inspect(compiled).graph
    again = [
        str(node.target).removeprefix("aten._").removesuffix(".default")
        for node in graph.nodes
        if graph.phases.get(node.name) is Phase.BACKWARD
        and str(node.target).startswith(("aten._safe_softmax", "aten._scaled", "aten.native_drop"))
        and "backward" not in str(node.target)
    ]
    made = "safe_softmax" if dropout else "scaled_dot_product_flash_attention_for_cpu"
    assert again == [made] * 2  # what is dropped is drawn once, in the forward

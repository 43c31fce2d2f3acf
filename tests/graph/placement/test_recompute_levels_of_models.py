"""What is worth making again in traced models: found from the step alone, whatever the model is."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Mapping
from itertools import pairwise

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from cotrain_compile import presets
from cotrain_compile.analysis.costs import roofline
from cotrain_compile.analysis.liveness import liveness
from cotrain_compile.dataflow import Dataflow, Phase
from cotrain_compile.entry.tracing import trace
from cotrain_compile.placement.recompute.levels import FoundLevels, Level, find_levels
from cotrain_compile.placement.recompute.recomputable import recomputable
from cotrain_compile.placement.recompute.regions import every_layer
from cotrain_compile.placement.recompute.rewrite import recomputed, recomputed_ops

WIDTH, HEADS, LENGTH, LAYERS, TIMES = 256, 4, 512, 2, 12


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.before, self.between = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.heads, self.mix = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.widen, self.narrow = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        parts = self.heads(self.before(x)).chunk(3, -1)
        q, k, v = (part.unflatten(-1, (HEADS, -1)).transpose(1, 2) for part in parts)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.mix(mixed.transpose(1, 2).flatten(2))
        return x + self.narrow(F.gelu(self.widen(self.between(x))))  # type: ignore[no-any-return]


class Transformer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block() for _ in range(LAYERS))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


class Functional(nn.Module):
    """Layers that are no modules, of parameters in a list."""

    def __init__(self) -> None:
        super().__init__()
        sizes = [(4 * WIDTH, WIDTH), (WIDTH, 4 * WIDTH)] * 8
        self.weights = nn.ParameterList(torch.randn(size) for size in sizes)

    def forward(self, x: Tensor) -> Tensor:
        for i in range(0, len(self.weights), 2):
            wide = torch.sigmoid(x @ self.weights[i].t()) * 2.0
            x = x + torch.tanh(wide) @ self.weights[i + 1].t()
        return x


class UNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        sizes = ((3, 8), (8, 16), (16, 32))
        self.down = nn.ModuleList(nn.Conv2d(a, b, 3, padding=1) for a, b in sizes)
        self.up = nn.ModuleList(nn.Conv2d(2 * b, a, 3, padding=1) for a, b in reversed(sizes))

    def forward(self, x: Tensor) -> Tensor:
        passed = []
        for conv in self.down:
            x = F.silu(conv(x))
            passed.append(x)
            x = F.avg_pool2d(x, 2)
        for conv in self.up:
            x = F.silu(conv(torch.cat((F.interpolate(x, scale_factor=2.0), passed.pop()), 1)))
        return x


class Scan(nn.Module):
    """A selective state space: a state that decays by what the input says."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.put = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        gate, put = torch.sigmoid(self.gate(x)), F.silu(self.put(x))
        state, out = torch.zeros_like(x[:, 0]), []
        for time in range(TIMES):
            state = state * gate[:, time] + torch.tanh(put[:, time]) * (1 - gate[:, time])
            out.append(state)
        return torch.stack(out, 1)


SHAPES: dict[type[nn.Module], tuple[int, ...]] = {
    Transformer: (8, LENGTH, WIDTH),
    Functional: (4096, WIDTH),
    UNet: (64, 3, 64, 64),
    Scan: (4096, TIMES, WIDTH),
}


def traced(model_type: type[nn.Module]) -> Dataflow:
    """The step of a model; nothing of it is allocated."""
    return _traced(model_type.__name__)


@functools.cache
def _traced(name: str) -> Dataflow:
    (model_type,) = (shape for shape in SHAPES if shape.__name__ == name)

    def build() -> tuple[Callable[[Tensor], Tensor], tuple[Tensor]]:
        model = model_type()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

        def step(x: Tensor) -> Tensor:
            loss: Tensor = model(x).pow(2).mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            return loss.detach()

        return step, (torch.empty(SHAPES[model_type]),)

    torch._dynamo.reset()
    return trace(build)


def seconds_of(dataflow: Dataflow) -> Mapping[str, float]:
    """On a card whose compute is slow beside its memory.

    Where it is fast, which norms are in the cheapest level differs from layer to layer.
    """
    return roofline(dataflow, presets.find("h20")).device_s


def levels_of(dataflow: Dataflow) -> FoundLevels:
    return find_levels(dataflow, seconds_of(dataflow), recomputable(dataflow))


def kept_bytes(dataflow: Dataflow) -> int:
    """What is alive where the backward begins."""
    begin = next(i for i, op in enumerate(dataflow.ops) if op.phase is Phase.BACKWARD)
    return sum(buffer.nbytes for buffer in liveness(dataflow).live_at(begin))


def makers(dataflow: Dataflow, level: Level) -> Counter[str]:
    """By which ops the values of a level are made."""
    target = {name: op.target.split(".")[1] for op in dataflow.ops for name in op.writes}
    return Counter(target[name] for name in level.recomputed)


@pytest.mark.parametrize("model_type", SHAPES)
def test_a_level_saves_and_takes_what_it_says(model_type: type[nn.Module]) -> None:
    dataflow = traced(model_type)
    seconds, levels = seconds_of(dataflow), levels_of(dataflow)
    assert levels.uniform
    for level in (*levels.uniform, *(region.levels[0] for region in levels.regions[1:2])):
        again = recomputed_ops(dataflow, level.recomputed).values()
        left = kept_bytes(dataflow) - kept_bytes(recomputed(dataflow, level.recomputed))
        assert level.saved_bytes == left
        assert level.seconds == pytest.approx(sum(seconds[op] for op in again))


@pytest.mark.parametrize("model_type", SHAPES)
def test_levels_are_nested_and_get_dearer(model_type: type[nn.Module]) -> None:
    levels = levels_of(traced(model_type))
    for nested in (levels.uniform, *(region.levels for region in levels.regions)):
        for less, more in pairwise(nested):
            assert less.recomputed < more.recomputed
            assert less.saved_bytes < more.saved_bytes
        prices = [level.seconds / level.saved_bytes for level in nested]
        assert prices == sorted(prices)


def test_cheap_ops_of_a_transformer_come_first_and_its_layers_last() -> None:
    dataflow = traced(Transformer)
    (first, *_, last), *others = (region.levels for region in levels_of(dataflow).regions)
    assert makers(dataflow, first).keys() <= {"gelu", "native_layer_norm"}
    assert {"addmm", "_scaled_dot_product_flash_attention_for_cpu"} <= set(makers(dataflow, last))
    whole = every_layer(dataflow, recomputable(dataflow))
    assert last.recomputed < whole
    assert len(others) == LAYERS - 1


def test_equal_layers_save_as_much_and_cost_nearly_as_much() -> None:
    """What follows the last one runs in one kernel with its ops, and no other layer has that."""
    dataflow = traced(Transformer)
    regions = [region.levels for region in levels_of(dataflow).regions]
    for number in (0, -1):
        first, *others = (levels[number] for levels in regions)
        for level in others:
            assert level.saved_bytes == first.saved_bytes
            assert makers(dataflow, level) == makers(dataflow, first)
            assert level.seconds == pytest.approx(first.seconds, rel=0.05)


def test_layers_in_functional_code_are_found_by_what_crosses_them() -> None:
    dataflow = traced(Functional)
    regions = levels_of(dataflow).regions
    assert len(regions) == 8
    assert [makers(dataflow, region.levels[0]) for region in regions] == [{"mul": 1, "tanh": 1}] * 8


@pytest.mark.parametrize("model_type", [Functional, UNet, Scan])
def test_models_without_layers_give_up_much_of_what_they_keep(model_type: type[nn.Module]) -> None:
    dataflow = traced(model_type)
    inputs = sum(buffer.nbytes for buffer in dataflow.buffers if buffer.is_input)
    most = levels_of(dataflow).uniform[-1]
    assert most.saved_bytes > 0.4 * (kept_bytes(dataflow) - inputs)

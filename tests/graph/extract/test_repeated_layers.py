"""A deep model's profile from a shallow trace equals that of a whole trace, figure by figure."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from cotrain_compile.cluster.model.profiles import LayerProfile, per_sample
from cotrain_compile.cluster.sources.profile_files import with_layers
from cotrain_compile.cluster.sources.traced_profile import profile_of_step
from cotrain_compile.entry.tracing import trace
from cotrain_compile.errors import OptionError
from cotrain_compile.presets import find


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(16)
        self.up, self.down = nn.Linear(16, 64, bias=False), nn.Linear(64, 16, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = x + self.down(F.gelu(self.up(self.norm(x))))
        return y


class Net(nn.Module):
    def __init__(self, depth: int) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(32, 16), nn.Linear(16, 32)
        self.layers = nn.ModuleList(Block() for _ in range(depth))

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)
        logits: Tensor = self.head(x)
        return logits


def profile_of(depth: int) -> LayerProfile:
    """Of a traced step with a symbolic batch, in bfloat16, clipped and updated by AdamW."""

    def build() -> tuple[Callable[[Tensor], Tensor], tuple[Tensor]]:
        model = Net(depth)
        optimizer = torch.optim.AdamW(model.parameters())

        def step(tokens: Tensor) -> Tensor:
            optimizer.zero_grad()
            with torch.autocast("cpu", torch.bfloat16):
                loss = F.cross_entropy(model(tokens).float(), tokens)
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            return loss

        return step, (torch.randint(0, 32, (4,)),)

    return profile_of_step("net", trace(build, dynamic=True), find("h100"))


def test_layers_repeated_have_the_figures_of_a_whole_trace() -> None:
    shallow, whole = profile_of(4), profile_of(5)
    assert [layer.name for layer in whole.layers] == [
        *("embed", *(f"layers.{i}" for i in range(5)), "head")
    ]
    deep = with_layers(shallow, 5)
    assert replace(deep, assumed=(), source="") == replace(whole, assumed=(), source="")
    assert deep.assumed[-1] == "Of 5 layers 4 were traced; the inner ones are equal."
    embed, first, second, third, *others = shallow.layers
    wider = replace(third, kept_bytes=third.kept_bytes and third.kept_bytes.times(1.002))
    near = with_layers(replace(shallow, layers=(embed, first, second, wider, *others)), 5)
    assert near.assumed[-1].endswith(
        "the inner ones differ by up to 0.20%, and have the largest figures."
    )
    assert [layer.kept_bytes for layer in near.layers[2:5]] == [wider.kept_bytes] * 3
    slower = replace(third, forward_s=per_sample(1.0))
    with pytest.raises(OptionError, match=r"layer layers\.2 is not as layers\.1"):
        with_layers(replace(shallow, layers=(embed, first, second, slower, *others)), 5)
    with pytest.raises(OptionError, match="no chain with four or more layers"):
        with_layers(replace(shallow, layers=(embed, first, second, third)), 5)

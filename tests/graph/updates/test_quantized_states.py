"""torchao's optimizers, whose states are tensors made of codes, scales and a table of values.

Against eager, in which torchao compiles each update by itself: here its functions run as written.
"""

from __future__ import annotations

import io
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

import cotrain_compile
from cotrain_compile.errors import CaptureError, CotrainError
from cotrain_compile.machine import Tier
from tests.support.closeness import same_bits

STEPS = 3
Run = Callable[[Tensor, Tensor], Tensor]


@pytest.fixture(scope="module")
def torchao() -> Any:
    return pytest.importorskip("torchao.optim")


class Training:
    """A model with a weight that is large enough to have quantized states, and one that is not."""

    def __init__(self, kind: Any, options: dict[str, Any] | None, **settings: Any) -> None:
        torch.manual_seed(0)
        dtype = torch.bfloat16 if settings.get("bf16_stochastic_round") else torch.float32
        self.model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 8)).to(dtype)
        self.optimizer = kind(self.model.parameters(), lr=1e-2, **settings)

        def step(x: Tensor, y: Tensor) -> Tensor:
            self.optimizer.zero_grad()
            loss = F.cross_entropy(self.model(x), y)
            loss.backward()
            self.optimizer.step()
            return loss.detach()

        self.is_eager = options is None
        self.run: Run = step
        if not self.is_eager:
            self.run = torch.compile(step, backend="cotrain", options=options)

    def train(self, steps: range = range(STEPS)) -> None:
        stance = "force_eager" if self.is_eager else "default"
        with torch.compiler.set_stance(stance):
            for seed in steps:
                torch.manual_seed(100 + seed)
                x = torch.randn(16, 64).to(next(self.model.parameters()).dtype)
                self.run(x, torch.randint(0, 8, (16,)))

    def tensors(self) -> dict[str, Tensor]:
        """All that the training has made, each tensor that a state is made of by itself."""
        found: dict[str, Tensor] = dict(self.model.named_parameters())
        for name, param in self.model.named_parameters():
            for key, value in self.optimizer.state[param].items():
                found |= parts(f"{name}.{key}", value)
        return found


def parts(name: str, value: Tensor) -> dict[str, Tensor]:
    if not is_traceable_wrapper_subclass(value):
        return {name: value}
    return {f"{name}.{inner}": getattr(value, inner) for inner in value.__tensor_flatten__()[0]}


def require_same(found: Training, expected: Training) -> None:
    ours, theirs = found.tensors(), expected.tensors()
    assert ours.keys() == theirs.keys()
    assert any(name.endswith(".codes") for name in ours)
    assert [name for name in ours if not same_bits(ours[name], theirs[name])] == []


LONG = pytest.mark.long


@pytest.mark.parametrize(
    ("kind", "settings"),
    [
        ("AdamW8bit", {}),
        pytest.param("AdamW4bit", {}, marks=LONG),
        pytest.param("AdamWFp8", {}, marks=LONG),
        pytest.param("Adam8bit", {"weight_decay": 0.1}, marks=LONG),
        pytest.param("AdamW8bit", {"bf16_stochastic_round": True}, marks=LONG),
    ],
)
@pytest.mark.parametrize(
    "policy",
    ["streamed", *(pytest.param(p, marks=LONG) for p in ("resident", "zero-offload", "coarse"))],
)
def test_an_optimizer_with_quantized_states_trains_as_in_eager(
    torchao: Any, kind: str, settings: dict[str, Any], policy: str
) -> None:
    trained = []
    for options in (None, {"policy": policy, "host_kernels": "captured"}):
        training = Training(getattr(torchao, kind), options, **settings)
        training.train()
        trained.append(training)
    require_same(trained[1], trained[0])


@pytest.mark.long
@pytest.mark.parametrize("kind", ["AdamW8bit", "AdamW4bit", "AdamWFp8"])
def test_quantized_states_leave_the_device_within_a_budget(torchao: Any, kind: str) -> None:
    expected = Training(getattr(torchao, kind), {"policy": "resident"})
    expected.train()
    peak_bytes = cotrain_compile.inspect(expected.run).predicted.peak_bytes[Tier.DEVICE]
    budget = int(0.75 * peak_bytes)
    found = Training(getattr(torchao, kind), {"memory_budget": budget})
    found.train()
    assert cotrain_compile.inspect(found.run).predicted.peak_bytes[Tier.DEVICE] <= budget
    require_same(found, expected)


def test_loaded_quantized_states_land_in_their_homes(torchao: Any) -> None:
    """As a run that is resumed: the first half in eager, from a file that holds no code."""
    whole = Training(torchao.AdamW8bit, None)
    whole.train(range(2))
    file = io.BytesIO()
    torch.save([whole.model.state_dict(), whole.optimizer.state_dict()], file)
    whole.train(range(2, 4))

    resumed = Training(torchao.AdamW8bit, {"policy": "zero-offload", "host_kernels": "captured"})
    resumed.train(range(1))
    homes = {id(part) for part in resumed.tensors().values() if part.dim()}
    file.seek(0)
    weights, states = torch.load(file, weights_only=True)
    resumed.model.load_state_dict(weights)
    resumed.optimizer.load_state_dict(states)
    assert {id(part) for part in resumed.tensors().values() if part.dim()} == homes
    resumed.train(range(2, 4))
    require_same(resumed, whole)


def test_a_batch_made_of_others_is_refused(torchao: Any) -> None:
    training = Training(torchao.AdamW8bit, {"policy": "resident"})
    quantized = Training(torchao.AdamW8bit, None)
    quantized.train(range(1))
    moments = next(iter(quantized.optimizer.state.values()))["exp_avg"]
    x = torch.randn(16, 64)

    def step() -> Tensor:
        loss: Tensor = (training.model(x).sum() * moments.dequantize()[0, 0]).square()
        loss.backward()
        training.optimizer.step()
        return loss.detach()

    with pytest.raises(CaptureError, match="is a OptimState8bit, a tensor made of"):
        torch.compile(step, backend="cotrain")()


def test_a_trace_that_fails_leaves_no_quantized_state(torchao: Any) -> None:
    training = Training(torchao.AdamW8bit, {"memory_budget": 1000})
    with pytest.raises(CotrainError):
        training.train(range(1))
    assert not training.optimizer.state

"""Models that FSDP2 shards are captured as they are, and still run in eager."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import pytest
import torch
from torch import nn
from torch._dynamo.utils import counters
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecisionPolicy, fully_shard

from cotrain_compile.distribute import ranks
from cotrain_compile.errors import CaptureError
from tests.support.ranks import Ranks
from tests.support.sharded_training import (
    OPTIMIZERS,
    Net,
    Training,
    batch,
    fully_sharded,
    furthest,
    step_of,
    train,
    whole,
)

TOO_OLD = ranks.why_no_dtensor_steps()
sharded_steps = pytest.mark.skipif(TOO_OLD is not None, reason=TOO_OLD or "")


def _in_turns(rank: int, turns: str) -> tuple[list[float], dict[str, torch.Tensor], int]:
    """Steps of one model: (v)alidated or (t)rained in eager, trained by a (c)ompiled step."""
    torch.manual_seed(0)
    counters.clear()
    model = fully_sharded(Net())
    optimizer = OPTIMIZERS["sgd"]([p for p in model.parameters() if p.requires_grad])
    step = step_of(model, optimizer, "clipped")
    compiled = torch.compile(step, backend="cotrain", options={"quiet": True})
    values = []
    for number, turn in enumerate(turns):
        x, y = batch(number, rank)
        if turn == "v":
            with torch.no_grad():
                values.append(float(model(x).sum()))
        else:
            values.append(float((compiled if turn == "c" else step)(x, y)))
    return values, whole(model.state_dict()), counters["stats"]["unique_graphs"]


@sharded_steps
@pytest.mark.long
def test_eager_and_compiled_steps_of_one_model_take_turns(two_ranks: Ranks) -> None:
    """Parameters that eager leaves whole, as after a validation, are sharded again."""
    eager = two_ranks.run(_in_turns, "vtvtvt")
    mixed = two_ranks.run(_in_turns, "vcvtvc")
    for (values, params, graphs), (expected, expected_params, _) in zip(mixed, eager, strict=True):
        assert values == pytest.approx(expected, abs=2e-6)
        assert all(
            torch.allclose(params[name], expected_params[name], atol=2e-6) for name in params
        )
        assert graphs == 1


@sharded_steps
@pytest.mark.parametrize(
    "kind",
    [
        "fully_shard in low precision",
        pytest.param("replicas of fully_shard", marks=pytest.mark.long),
    ],
)
def test_policies_and_replicas_are_those_of_fully_shard(two_ranks: Ranks, kind: str) -> None:
    # Eager adds up both gradients of a tied weight in bfloat16, before it reduces them.
    rounding = 1e-3 if "low" in kind else 2e-6
    eager = two_ranks.run(train, Training(kind, bare=True))
    for found in two_ranks.run(train, Training(kind, options={}, bare=True)):
        assert furthest(found, eager[0]) < rounding


def _ignoring(model: nn.Sequential) -> Any:
    return fully_shard(model, ignored_params={model[0].weight})  # type: ignore[arg-type]


def _with_factor(model: nn.Sequential) -> Any:
    sharded: Any = fully_shard(model)
    sharded.set_gradient_divide_factor(1.0)
    return sharded


def _in_a_list(model: nn.Sequential) -> Any:
    fully_shard([model[0], model[1]])
    return fully_shard(model)


def _with_hook(model: nn.Sequential) -> Any:
    sharded: Any = fully_shard(model)
    sharded.set_all_reduce_hook(lambda reduced: None)
    return sharded


def _in_half(model: nn.Sequential) -> Any:
    return fully_shard(model, mp_policy=MixedPrecisionPolicy(param_dtype=torch.float16))


def _by_fsdp1(model: nn.Sequential) -> nn.Module:
    return FullyShardedDataParallel(model, device_id=torch.device("cpu"), use_orig_params=True)


REFUSED: list[tuple[Callable[[nn.Sequential], nn.Module], str]] = [
    (_ignoring, r"0\.weight is trained and not sharded .* leave ignored_params out"),
    (_with_factor, "set_gradient_divide_factor .* scale the loss"),
    (_in_a_list, "fully_shard was called on a list of modules"),
    (_with_hook, "the model has communication of its own"),
    (_in_half, "reduces gradients in float16"),
    (_by_fsdp1, r"use fully_shard\(model\)"),
]


@sharded_steps
@pytest.mark.parametrize(("setup", "told"), REFUSED)
def test_what_cannot_be_captured_is_refused_in_words(
    rank_of_two: None, setup: Callable[[nn.Sequential], nn.Module], told: str
) -> None:
    with pytest.raises(CaptureError, match=told):
        _trained_once(setup)


def test_a_torch_that_traces_no_sharded_step_is_told(
    rank_of_two: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ranks, "_FIRST_WITH_DTENSORS", "99.0")
    with pytest.raises(CaptureError, match=r"sharded parameters need torch 99\.0 or newer"):
        _trained_once(cast(Any, fully_shard))


def _trained_once(setup: Callable[[nn.Sequential], nn.Module]) -> None:
    model = setup(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(x: torch.Tensor) -> None:
        optimizer.zero_grad()
        model(x).sum().backward()
        optimizer.step()

    torch.compile(step, backend="cotrain")(torch.ones(2, 4))

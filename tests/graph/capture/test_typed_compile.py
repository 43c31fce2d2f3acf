"""`cotrain_compile.compile`: keywords are the options, and mistakes show at the call."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import fields
from functools import partial
from pathlib import Path
from typing import Any, Literal, get_args, get_origin, get_type_hints

import pytest
import torch
from torch import Tensor, nn

import cotrain_compile
from cotrain_compile.errors import OptionError
from cotrain_compile.options import TABLE, Keywords, Options, options_schema
from tests.support.steps import Step, cotrain

TYPES = get_type_hints(Keywords)


def test_the_keywords_are_the_options() -> None:
    assert list(TYPES) == [item.name for item in fields(Options)]
    assert {name: option.given for name, option in TABLE.items()} == TYPES
    shown = inspect.signature(cotrain_compile.compile).parameters
    assert list(shown) == ["step", "dynamic", *TYPES]
    assert all(shown[item.name].default == item.default for item in fields(Options))


@pytest.mark.parametrize("name", [name for name in TYPES if get_origin(TYPES[name]) is Literal])
def test_the_choices_of_a_keyword_are_those_of_the_option(name: str) -> None:
    for choice in get_args(TYPES[name]):
        assert getattr(Options.parse({name: choice}), name) == choice
    with pytest.raises(OptionError) as refused:
        Options.parse({name: "another"})
    told = str(refused.value).partition("one of ")[2].partition(" (did")[0]
    assert told == ", ".join(map(repr, get_args(TYPES[name])))


def test_the_schema_has_the_options_their_choices_and_defaults() -> None:
    schema = options_schema()
    assert schema["additionalProperties"] is False
    assert list(schema["properties"]) == [item.name for item in fields(Options)]
    for item in fields(Options):
        told = schema["properties"][item.name]
        default = item.default
        assert told["description"] == TABLE[item.name].words
        assert told["default"] == (list(default) if isinstance(default, tuple) else default)
        if get_origin(TYPES[item.name]) is Literal:
            assert tuple(told["enum"]) == get_args(TYPES[item.name])


def a_step() -> tuple[Step, nn.Linear]:
    torch.manual_seed(0)
    model = nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(x: Tensor) -> Tensor:
        loss: Tensor = model(x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    return step, model


def test_a_step_runs_as_by_torch_compile_as_a_call_and_as_a_decorator() -> None:
    x, ends = torch.ones(3, 4), []
    ways: list[Callable[[Step], Step]] = [
        cotrain(policy="zero-offload", quiet=True),
        partial(cotrain_compile.compile, policy="zero-offload", quiet=True),
        cotrain_compile.compile(policy="zero-offload", quiet=True),
    ]
    for way in ways:
        plain, model = a_step()
        step = way(plain)
        ends.append([step(x), *model.parameters()])
        assert cotrain_compile.inspect(step).plan.placement.policy == "zero-offload"
    for end in ends[1:]:
        torch.testing.assert_close(end, ends[0], rtol=0, atol=0)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"memory_bugdet": 1}, "unknown option 'memory_bugdet' .did you mean 'memory_budget'"),
        ({"memory_budget": "20 gigs"}, "'gigs' is no unit"),
        ({"plan": Path("missing.json")}, "missing.json.*No such file"),
        ({"machine": "rtx-4090"}, "no machine named 'rtx-4090'.*did you mean 'rtx4090'"),
    ],
)
def test_a_mistake_shows_at_the_call(options: dict[str, Any], says: str) -> None:
    with pytest.raises(OptionError, match=says):
        cotrain_compile.compile(a_step()[0], **options)


def test_a_model_is_no_step() -> None:
    with pytest.raises(OptionError, match="the module Linear, but needs the function that runs"):
        cotrain_compile.compile(nn.Linear(2, 2))

"""What an action is, and how a module of actions lists its own.

An action takes a `Training` and a random source; twins get sources that draw the same. What it
returns is compared, and so is what it raises.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable
from types import ModuleType
from typing import Any

from torch import nn

from tests.support.sequences.twin import Training

Action = Callable[[Training, random.Random], Any]
_BY_MODULE: dict[str, dict[str, Action]] = {}


def action(function: Action) -> Action:
    """List `function` as an action of its module."""
    _BY_MODULE.setdefault(function.__module__, {})[function.__name__] = function
    return function


def actions_of(modules: Iterable[ModuleType]) -> dict[str, Action]:
    """The actions of `modules` by name, in their order, whichever was imported first."""
    return {
        name: function
        for module in modules
        for name, function in _BY_MODULE[module.__name__].items()
    }


def some_group(training: Training, rng: random.Random) -> dict[str, Any]:
    group: dict[str, Any] = rng.choice(training.optimizer.param_groups)
    return group


def some_parameter(training: Training, rng: random.Random) -> nn.Parameter:
    param: nn.Parameter = rng.choice(list(training.model.parameters()))
    return param


def some_module(training: Training, rng: random.Random) -> nn.Module:
    module: nn.Module = rng.choice([training.model.first, training.model.norm, training.model.head])
    return module

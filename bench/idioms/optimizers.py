"""Idioms of optimizers: torch's with their settings, and the ones that people write themselves."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from bench.idioms.registry import optimizer_idiom


def _torch_optimizers() -> dict[str, Callable[[nn.Module], Optimizer]]:
    """torch's optimizers by what is set."""
    o = torch.optim
    settings: dict[str, tuple[Any, dict[str, Any]]] = {
        "SGD alone": (o.SGD, {"lr": 0.1}),
        "SGD with Nesterov momentum": (o.SGD, {"lr": 0.05, "momentum": 0.9, "nesterov": True}),
        "SGD with dampening": (o.SGD, {"lr": 0.05, "momentum": 0.9, "dampening": 0.3}),
        "SGD that maximises": (o.SGD, {"lr": 0.01, "maximize": True}),
        "SGD with decay only": (o.SGD, {"lr": 0.05, "weight_decay": 0.2}),
        "SGD by foreach": (o.SGD, {"lr": 0.05, "momentum": 0.5, "foreach": True}),
        "SGD fused": (o.SGD, {"lr": 0.05, "momentum": 0.5, "fused": True}),
        "SGD at rate zero": (o.SGD, {"lr": 0.0, "momentum": 0.5}),
        "Adam with AMSGrad": (o.Adam, {"lr": 0.02, "amsgrad": True}),
        "Adam with decoupled decay": (
            o.Adam,
            {"lr": 0.02, "weight_decay": 0.1, "decoupled_weight_decay": True},
        ),
        "Adam with other betas": (o.Adam, {"lr": 0.02, "betas": (0.5, 0.9)}),
        "Adam with no momentum": (o.Adam, {"lr": 0.02, "betas": (0.0, 0.99)}),
        "Adam with a large epsilon": (o.Adam, {"lr": 0.02, "eps": 0.1}),
        "Adam that maximises": (o.Adam, {"lr": 0.02, "maximize": True}),
        "Adam with much decay": (o.Adam, {"lr": 0.02, "weight_decay": 2.0}),
        "Adam at a tensor rate": (o.Adam, {"lr": torch.tensor(0.02), "foreach": False}),
        "AdamW without decay": (o.AdamW, {"lr": 0.02, "weight_decay": 0.0}),
        "AdamW with much decay": (o.AdamW, {"lr": 0.02, "weight_decay": 2.0}),
        "AdamW with AMSGrad": (o.AdamW, {"lr": 0.02, "amsgrad": True}),
        "AdamW fused": (o.AdamW, {"lr": 0.02, "fused": True}),
        "AdamW with a long memory": (o.AdamW, {"lr": 0.02, "betas": (0.99, 0.9999)}),
        "Adagrad with rate decay": (o.Adagrad, {"lr": 0.05, "lr_decay": 0.1}),
        "Adagrad with weight decay": (o.Adagrad, {"lr": 0.05, "weight_decay": 0.1}),
        "Adagrad with an initial sum": (o.Adagrad, {"lr": 0.05, "initial_accumulator_value": 0.1}),
        "Adagrad that maximises": (o.Adagrad, {"lr": 0.05, "maximize": True}),
        "RMSprop": (o.RMSprop, {"lr": 0.01}),
        "RMSprop centred": (o.RMSprop, {"lr": 0.01, "centered": True}),
        "RMSprop with momentum": (o.RMSprop, {"lr": 0.01, "momentum": 0.9, "weight_decay": 0.1}),
        "Adadelta": (o.Adadelta, {"lr": 1.0, "weight_decay": 0.1}),
        "Adamax": (o.Adamax, {"lr": 0.02, "weight_decay": 0.1}),
        "NAdam": (o.NAdam, {"lr": 0.02}),
        "NAdam with decoupled decay": (
            o.NAdam,
            {"lr": 0.02, "weight_decay": 0.1, "decoupled_weight_decay": True},
        ),
        "RAdam": (o.RAdam, {"lr": 0.02}),
        "RAdam with decay": (o.RAdam, {"lr": 0.02, "weight_decay": 0.1}),
        "ASGD": (o.ASGD, {"lr": 0.05}),
        "Rprop": (o.Rprop, {"lr": 0.01}),
        "Adafactor": (o.Adafactor, {"lr": 0.02}),
        "Adafactor with decay": (
            o.Adafactor,
            {"lr": 0.02, "weight_decay": 0.1, "beta2_decay": -0.5},
        ),
    }
    return {name: _maker(name, *setting) for name, setting in settings.items()}


def _maker(name: str, kind: Any, given: dict[str, Any]) -> Callable[[nn.Module], Optimizer]:
    def make(model: nn.Module) -> Optimizer:
        return kind(model.parameters(), **given)  # type: ignore[no-any-return]

    make.__name__ = name
    return make


for _make in _torch_optimizers().values():
    optimizer_idiom(_make)


@optimizer_idiom
def groups_with_and_without_decay(model: nn.Module) -> Optimizer:
    weights = [p for p in model.parameters() if p.dim() > 1]
    biases = [p for p in model.parameters() if p.dim() <= 1]
    return torch.optim.AdamW(
        [{"params": weights, "weight_decay": 0.5}, {"params": biases, "weight_decay": 0.0}], lr=0.02
    )


@optimizer_idiom
def a_rate_for_each_layer(model: nn.Module) -> Optimizer:
    return torch.optim.SGD(
        [{"params": [p], "lr": 0.05 * 0.7**i} for i, p in enumerate(model.parameters())],
        momentum=0.9,
    )


@optimizer_idiom
def one_parameter_only(model: nn.Module) -> Optimizer:
    return torch.optim.AdamW([next(iter(model.parameters()))], lr=0.02)


@optimizer_idiom
def named_parameters(model: nn.Module) -> Optimizer:
    return torch.optim.AdamW(model.named_parameters(), lr=0.02)


@optimizer_idiom
def group_added_later(model: nn.Module) -> Optimizer:
    first, *rest = model.parameters()
    optimizer = torch.optim.SGD([first], lr=0.05, momentum=0.9)
    optimizer.add_param_group({"params": rest, "lr": 0.01, "momentum": 0.0})
    return optimizer

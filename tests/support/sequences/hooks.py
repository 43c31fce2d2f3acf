"""Hooks of modules, gradients and optimizers, which come and go."""

from __future__ import annotations

import random
from typing import Any

import torch
from torch import Tensor, nn

from tests.support.sequences.registry import action
from tests.support.sequences.twin import Training


@action
def hook_forward(training: Training, rng: random.Random) -> None:
    module = rng.choice([training.model.first, training.model.act, training.model])
    training.hooks.append(module.register_forward_hook(lambda m, inputs, out: out * 1.5))


@action
def hook_forward_pre(training: Training, rng: random.Random) -> None:
    module = rng.choice([training.model.first, training.model.act, training.model])
    training.hooks.append(module.register_forward_pre_hook(lambda m, inputs: inputs[0] * 1.25))


@action
def hook_backward(training: Training, rng: random.Random) -> None:
    module = training.model.act
    hook = module.register_full_backward_hook(lambda m, into, out: (into[0] * 2,))
    training.hooks.append(hook)


@action
def hook_every_module(training: Training, rng: random.Random) -> None:
    mine = training.model.act

    def halve(module: nn.Module, inputs: Any, out: Tensor) -> Any:
        return out * 0.5 if module is mine else None

    training.hooks.append(nn.modules.module.register_module_forward_hook(halve))


@action
def hook_gradient(training: Training, rng: random.Random) -> None:
    param = training.model.first.weight
    if param.requires_grad:
        training.hooks.append(param.register_hook(lambda grad: grad * 2))


@action
def hook_accumulated(training: Training, rng: random.Random) -> None:
    def halve(param: Tensor) -> None:
        assert param.grad is not None
        param.grad.mul_(0.5)

    param = training.model.first.weight
    if param.requires_grad:
        training.hooks.append(param.register_post_accumulate_grad_hook(halve))


@action
def hook_optimizer(training: Training, rng: random.Random) -> None:
    def shrink(optimizer: Any, args: Any, kwargs: Any) -> None:
        with torch.no_grad():
            for group in optimizer.param_groups:
                for param in group["params"]:
                    param.mul_(0.99)

    optimizer = training.optimizer
    kind = rng.choice([optimizer.register_step_post_hook, optimizer.register_step_pre_hook])
    training.hooks.append(kind(shrink))


@action
def unhook(training: Training, rng: random.Random) -> None:
    if training.hooks:
        training.hooks.pop(rng.randrange(len(training.hooks))).remove()

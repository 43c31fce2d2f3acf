"""Changes of an optimizer: its groups, settings, states and gradients."""

from __future__ import annotations

import copy
import random
from typing import Any

import torch
from torch import Tensor, nn

from tests.support.sequences.registry import action, some_group, some_parameter
from tests.support.sequences.twin import Training


@action
def set_rate(training: Training, rng: random.Random) -> None:
    some_group(training, rng)["lr"] = rng.choice([1e-3, 5e-3, 2e-2, 0.0])


@action
def set_rate_tensor(training: Training, rng: random.Random) -> None:
    some_group(training, rng)["lr"] = torch.tensor(rng.choice([1e-3, 5e-3]), dtype=torch.float64)


@action
def set_setting(training: Training, rng: random.Random) -> None:
    group = some_group(training, rng)
    settings: dict[str, list[Any]] = {
        "weight_decay": [0.0, 0.1, 0.2],
        "betas": [(0.5, 0.75), (0.25, 0.75), (0.5, 0.5)],
        "momentum": [0.9, 0.5],
        "eps": [1e-2, 2e-2],
        "maximize": [True, False],
        "alpha": [0.99, 0.9],
        # With `compiled_corrections` eager's Adam over lists has tensors where torch takes numbers.
        "foreach": [False, None] if "betas" in group else [True, False, None],
        "nesterov": [True, False],
    }
    known = [name for name in settings if name in group]
    if not group.get("momentum", 0.0):
        known = [name for name in known if name != "nesterov"]
    name = rng.choice(known)
    group[name] = rng.choice(settings[name])


@action
def add_group(training: Training, rng: random.Random) -> None:
    """A new layer behind the head, in a group of its own."""
    head = training.model.head
    new = nn.Linear(head.weight.shape[0] if isinstance(head, nn.Linear) else 3, 3)
    new.to(training.dtype)
    training.model.head = nn.Sequential(head, new)
    training.optimizer.add_param_group({"params": list(new.parameters()), "lr": 2e-2})


@action
def schedule(training: Training, rng: random.Random) -> None:
    if training.scheduler is None:
        training.scheduler = torch.optim.lr_scheduler.ExponentialLR(training.optimizer, 0.9)
    if len(training.scheduler.base_lrs) == len(training.optimizer.param_groups):
        training.optimizer._opt_called = True  # torch warns where a compiled step has been called
        training.scheduler.step()


@action
def schedule_rate_tensor(training: Training, rng: random.Random) -> None:
    """A scheduler that writes the rate in place, as into a tensor of a capturable optimizer."""
    for group in training.optimizer.param_groups:
        group["lr"] = torch.as_tensor(float(group["lr"]), dtype=torch.float64)
    training.scheduler = torch.optim.lr_scheduler.ExponentialLR(training.optimizer, 0.9)
    training.optimizer._opt_called = True
    training.scheduler.step()


@action
def clear_gradients(training: Training, rng: random.Random) -> None:
    kind = rng.choice(["model", "optimizer", "zeros", "one"])
    if kind == "model":
        training.model.zero_grad()
    elif kind == "one":
        some_parameter(training, rng).grad = None
    else:
        training.optimizer.zero_grad(set_to_none=kind == "optimizer")


@action
def set_gradient(training: Training, rng: random.Random) -> None:
    param = some_parameter(training, rng)
    param.grad = torch.ones_like(param) if param.grad is None else param.grad * 2


@action
def clear_states(training: Training, rng: random.Random) -> None:
    if rng.random() < 0.5:
        training.optimizer.state.clear()
    else:
        training.optimizer.state.pop(some_parameter(training, rng), None)


@action
def edit_gradients(training: Training, rng: random.Random) -> None:
    """Scaled in place, as a loop does that clips by itself."""
    for param in training.model.parameters():
        if param.grad is not None:
            param.grad.mul_(0.5)


@action
def edit_states(training: Training, rng: random.Random) -> None:
    """In place, or by other tensors."""
    is_new = rng.random() < 0.5
    for state in training.optimizer.state.values():
        for key, value in list(state.items()):
            if isinstance(value, Tensor) and value.dim():
                if is_new:
                    state[key] = value * 0.5
                else:
                    value.mul_(0.5)


@action
def new_optimizer(training: Training, rng: random.Random) -> None:
    """Of the same kind, over the parameters as they are; the steps are written anew."""
    kind, groups = type(training.optimizer), training.optimizer.param_groups
    settings = {key: value for key, value in groups[0].items() if key in ("eps", "betas")}
    training.optimizer = kind(training.model.parameters(), lr=1e-2, **settings)
    training.scheduler = None
    training.rebuilt()


@action
def set_count(training: Training, rng: random.Random) -> None:
    """The number of steps, in place, or by another tensor."""
    is_new = rng.random() < 0.5
    for state in training.optimizer.state.values():
        if "step" in state:
            state["step"] = state["step"] + 3 if is_new else state["step"].add_(3)


@action
def share_gradients(training: Training, rng: random.Random) -> None:
    """All gradients are parts of one vector, as what exchanges them at once makes them."""
    params = [p for p in training.model.parameters() if p.requires_grad]
    flat = torch.ones(sum(p.numel() for p in params), dtype=training.dtype)
    for param, part in zip(params, flat.split([p.numel() for p in params]), strict=True):
        param.grad = part.view_as(param)


@action
def drop_a_parameter(training: Training, rng: random.Random) -> None:
    """The optimizer forgets one parameter, or gets it back in a group of its own."""
    param = training.model.norm.weight
    groups = training.optimizer.param_groups
    if any(param is known for group in groups for known in group["params"]):
        for group in groups:
            group["params"] = [known for known in group["params"] if known is not param]
    else:
        training.optimizer.add_param_group({"params": [param], "lr": 1e-3})


@action
def copy_optimizer(training: Training, rng: random.Random) -> None:
    """As trainers do that keep one aside: a copy is made and nobody uses it."""
    copy.deepcopy(training.optimizer)


@action
def plateau(training: Training, rng: random.Random) -> None:
    torch.optim.lr_scheduler.ReduceLROnPlateau(training.optimizer, patience=0).step(1.0)


@action
def cycle(training: Training, rng: random.Random) -> None:
    """A schedule that moves momentum, or betas, with the rate."""
    group = training.optimizer.param_groups[0]
    if group.get("momentum", 0) or "betas" in group:
        training.scheduler = torch.optim.lr_scheduler.OneCycleLR(
            training.optimizer, 2e-2, total_steps=200, base_momentum=0.5, max_momentum=0.75
        )

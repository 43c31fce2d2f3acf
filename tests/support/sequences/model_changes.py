"""Changes of parameters and modules."""

from __future__ import annotations

import gc
import random

import torch
import torch.nn.utils.prune
from torch import Tensor, nn

from tests.support.sequences.registry import action, some_module, some_parameter
from tests.support.sequences.twin import HIDDEN, WIDTH, Training


@action
def freeze(training: Training, rng: random.Random) -> None:
    some_module(training, rng).requires_grad_(False)
    training.model.head.requires_grad_(True)  # something is left to train


@action
def unfreeze(training: Training, rng: random.Random) -> None:
    training.model.requires_grad_(True)


@action
def freeze_one(training: Training, rng: random.Random) -> None:
    training.model.first.weight.requires_grad_(rng.random() < 0.5)


@action
def switch_mode(training: Training, rng: random.Random) -> None:
    module = rng.choice([training.model, training.model.dropout, training.model.norm])
    module.train(not module.training)


@action
def edit_parameter(training: Training, rng: random.Random) -> None:
    param, kind = some_parameter(training, rng), rng.choice(["mul", "copy", "data"])
    with torch.no_grad():
        if kind == "mul":
            param.mul_(0.9)
        elif kind == "copy":
            param.copy_(torch.randn_like(param) * 0.3)
        else:
            param.data.add_(0.01)


@action
def set_data(training: Training, rng: random.Random) -> None:
    param = some_parameter(training, rng)
    new = param.detach() * 0.9
    param.data = new.T.contiguous().T if rng.random() < 0.3 and new.dim() == 2 else new


@action
def set_data_in_one_storage(training: Training, rng: random.Random) -> None:
    """As what makes all parameters parts of one vector does."""
    params = list(training.model.parameters())
    flat = torch.cat([param.detach().flatten() for param in params])
    nn.utils.vector_to_parameters(flat, params)


@action
def replace_parameter(training: Training, rng: random.Random) -> None:
    """The optimizer keeps the old one, or learns of the new one."""
    old = training.model.first.weight
    new = nn.Parameter(torch.randn(HIDDEN, WIDTH).to(old.dtype) * 0.4)
    training.model.first.weight = new
    if rng.random() < 0.6:
        for group in training.optimizer.param_groups:
            group["params"] = [new if param is old else param for param in group["params"]]
        training.optimizer.state.pop(old, None)


@action
def swap_tensors(training: Training, rng: random.Random) -> None:
    """Another tensor under the same name and identity, as `module.to` does where it is told to."""
    old = training.model.first.weight
    if training.was_cast or not old.requires_grad:
        return  # torch swaps no leaf that was trained, and then was cast or frozen
    old.grad = None
    gc.collect()  # Dynamo's guards of a call that failed are a cycle, with a weak reference in it
    other = nn.Parameter(old.detach() * 0.7, requires_grad=old.requires_grad)
    torch.utils.swap_tensors(old, other)


@action
def exchange_data(training: Training, rng: random.Random) -> None:
    norm = training.model.norm
    norm.weight.data, norm.bias.data = norm.bias.data, norm.weight.data


@action
def prune(training: Training, rng: random.Random) -> None:
    """A mask over the first weight, or none again."""
    first = training.model.first
    if nn.utils.prune.is_pruned(first):
        nn.utils.prune.remove(first, "weight")
    else:
        nn.utils.prune.random_unstructured(first, "weight", 0.3)


@action
def initialise(training: Training, rng: random.Random) -> None:
    training.model.first.reset_parameters()


@action
def share_memory(training: Training, rng: random.Random) -> None:
    training.model.share_memory()


@action
def wrap(training: Training, rng: random.Random) -> None:
    """A module around the activation, as adapters put one."""
    training.model.act = nn.Sequential(training.model.act, nn.Dropout(0.0))


@action
def replace_module(training: Training, rng: random.Random) -> None:
    training.model.act = rng.choice([nn.ReLU, nn.GELU, nn.Tanh, nn.Identity])()


@action
def set_attribute(training: Training, rng: random.Random) -> None:
    kind = rng.choice(["p", "eps", "momentum"])
    if kind == "p":
        training.model.dropout.p = rng.choice([0.0, 0.2, 0.5])
    elif kind == "eps":
        training.model.norm.eps = rng.choice([1e-5, 1e-3])
    elif isinstance(training.model.norm, nn.BatchNorm1d):
        training.model.norm.momentum = rng.choice([0.1, 0.3])


@action
def replace_buffer(training: Training, rng: random.Random) -> None:
    norm = training.model.norm
    if isinstance(norm, nn.BatchNorm1d):
        assert norm.running_mean is not None
        norm.running_mean = torch.ones_like(norm.running_mean)


@action
def tie(training: Training, rng: random.Random) -> None:
    """Norm weight and bias become one parameter, or two again."""
    norm = training.model.norm
    if norm.bias is norm.weight:
        norm.bias = nn.Parameter(norm.weight.detach().clone())
    else:
        norm.bias = norm.weight


@action
def parametrize(training: Training, rng: random.Random) -> None:
    """Weight norm of the head, which makes new parameters that the optimizer does not know."""
    head = training.model.head
    if isinstance(head, nn.Linear) and not hasattr(head, "parametrizations"):
        nn.utils.parametrizations.weight_norm(head)


@action
def change_dtype(training: Training, rng: random.Random) -> None:
    """Of the model, its states and the batches that follow."""
    training.dtype = torch.float32 if training.dtype == torch.float64 else torch.float64
    training.was_cast = True
    training.model.to(training.dtype)
    for state in training.optimizer.state.values():
        wide = [key for key, value in state.items() if isinstance(value, Tensor) and value.dim()]
        state.update({key: state[key].to(training.dtype) for key in wide})

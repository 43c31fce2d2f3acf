"""Idioms of models: layers, shapes and ways to put them together, small and in float64."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations

from bench.idioms.registry import CALLS, OUT, WIDTH, Batch, model_idiom


def images() -> list[Batch]:
    """Images and targets."""
    return [(torch.randn(4, 3, 8, 8).double(), torch.randn(4, OUT).double()) for _ in range(CALLS)]


def series() -> list[Batch]:
    """Sequences of vectors and targets."""
    return [(torch.randn(4, 5, WIDTH).double(), torch.randn(4, OUT).double()) for _ in range(CALLS)]


def tokens() -> list[Batch]:
    """Sequences of tokens and the next ones."""
    return [(torch.randint(0, 16, (4, 5)), torch.randint(0, 16, (4, 5))) for _ in range(CALLS)]


def next_token(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    """Cross entropy of tokens."""
    return F.cross_entropy(model(x).flatten(0, 1), y.flatten())


class Wrap(nn.Module):
    """A module whose forward is a function of it and its input."""

    def __init__(self, forward: Any, **modules: nn.Module) -> None:
        super().__init__()
        for name, module in modules.items():
            setattr(self, name, module)
        self.function = forward

    def forward(self, x: Tensor) -> Tensor:
        return self.function(self, x)  # type: ignore[no-any-return]


def stack(*middle: nn.Module) -> nn.Module:
    return nn.Sequential(nn.Linear(WIDTH, 8), *middle, nn.Linear(8, OUT))


@model_idiom()
def one_linear_layer() -> nn.Module:
    return nn.Linear(WIDTH, OUT)


@model_idiom()
def deep_narrow_net() -> nn.Module:
    layers = [m for _ in range(6) for m in (nn.Linear(8, 8), nn.ReLU())]
    return stack(*layers)


@model_idiom()
def dropout() -> nn.Module:
    return stack(nn.Dropout(0.3), nn.GELU())


@model_idiom()
def alpha_dropout() -> nn.Module:
    return stack(nn.SELU(), nn.AlphaDropout(0.2))


@model_idiom()
def gaussian_noise_layer() -> nn.Module:
    return Wrap(lambda m, x: m.net(x + 0.1 * torch.randn_like(x)), net=stack(nn.Tanh()))


@model_idiom()
def batch_norm() -> nn.Module:
    return stack(nn.BatchNorm1d(8), nn.ReLU())


@model_idiom()
def batch_norm_without_running_statistics() -> nn.Module:
    return stack(nn.BatchNorm1d(8, track_running_stats=False), nn.ReLU())


@model_idiom()
def batch_norm_in_evaluation() -> nn.Module:
    model = stack(nn.BatchNorm1d(8), nn.ReLU())
    model[1].eval()
    return model


@model_idiom()
def layer_norm() -> nn.Module:
    return stack(nn.LayerNorm(8), nn.SiLU())


@model_idiom()
def rms_norm() -> nn.Module:
    return stack(nn.RMSNorm(8), nn.SiLU())


@model_idiom()
def group_norm() -> nn.Module:
    return stack(nn.GroupNorm(2, 8), nn.Mish())


@model_idiom()
def weight_norm() -> nn.Module:
    return stack(nn.Tanh(), parametrizations.weight_norm(nn.Linear(8, 8)))


@model_idiom()
def spectral_norm() -> nn.Module:
    return stack(nn.Tanh(), parametrizations.spectral_norm(nn.Linear(8, 8)))


@model_idiom()
def orthogonal_layer() -> nn.Module:
    return stack(nn.Tanh(), parametrizations.orthogonal(nn.Linear(8, 8)))


class _Symmetric(nn.Module):
    def forward(self, w: Tensor) -> Tensor:
        return w.triu() + w.triu(1).T


@model_idiom()
def symmetric_parametrisation() -> nn.Module:
    layer = nn.Linear(8, 8)
    nn.utils.parametrize.register_parametrization(layer, "weight", _Symmetric())
    return stack(nn.Tanh(), layer)


@model_idiom()
def prelu() -> nn.Module:
    return stack(nn.PReLU())


@model_idiom()
def activations_of_all_kinds() -> nn.Module:
    kinds = (nn.ELU, nn.Hardswish, nn.Softsign, nn.LeakyReLU, nn.CELU, nn.LogSigmoid, nn.Softplus)
    return stack(*(kind() for kind in kinds))


@model_idiom()
def in_place_activations() -> nn.Module:
    return stack(nn.ReLU(inplace=True), nn.Linear(8, 8), nn.SiLU(inplace=True))


@model_idiom()
def gated_unit() -> nn.Module:
    return nn.Sequential(nn.Linear(WIDTH, 16), nn.GLU(), nn.Linear(8, OUT))


@model_idiom()
def residual_block() -> nn.Module:
    return Wrap(lambda m, x: m.head(x + m.block(x)), block=nn.Linear(6, 6), head=nn.Linear(6, 4))


@model_idiom()
def stochastic_depth() -> nn.Module:
    def forward(m: Any, x: Tensor) -> Tensor:
        kept = torch.bernoulli(torch.full((len(x), 1), 0.8, dtype=x.dtype))
        return m.head(x + kept * m.block(x))  # type: ignore[no-any-return]

    return Wrap(forward, block=nn.Linear(6, 6), head=nn.Linear(6, 4))


@model_idiom()
def learned_scale_of_a_layer() -> nn.Module:
    model = Wrap(
        lambda m, x: m.head(x + m.scale * m.block(x)), block=nn.Linear(6, 6), head=nn.Linear(6, 4)
    )
    model.scale = nn.Parameter(torch.full((6,), 1e-2))
    return model


@model_idiom()
def scalar_parameter() -> nn.Module:
    model = Wrap(lambda m, x: m.net(x) * m.temperature.exp(), net=stack(nn.Tanh()))
    model.temperature = nn.Parameter(torch.zeros(()))
    return model


@model_idiom()
def empty_parameter() -> nn.Module:
    model = Wrap(lambda m, x: m.net(x) + m.nothing.sum(), net=stack(nn.Tanh()))
    model.nothing = nn.Parameter(torch.zeros(0))
    return model


@model_idiom()
def parameters_in_a_list() -> nn.Module:
    model = Wrap(lambda m, x: m.head(sum(x * p for p in m.scales)), head=nn.Linear(6, 4))
    model.scales = nn.ParameterList([torch.rand(6) for _ in range(3)])
    return model


@model_idiom()
def parameters_in_a_dictionary() -> nn.Module:
    model = Wrap(lambda m, x: m.head(x * m.p["a"] + m.p["b"]), head=nn.Linear(6, 4))
    model.p = nn.ParameterDict({"a": torch.rand(6), "b": torch.rand(6)})
    return model


@model_idiom()
def parameter_never_used() -> nn.Module:
    model = Wrap(lambda m, x: m.net(x), net=stack(nn.Tanh()))
    model.idle = nn.Parameter(torch.rand(5))
    return model


@model_idiom()
def frozen_first_layer() -> nn.Module:
    model = stack(nn.Tanh())
    model[0].requires_grad_(False)
    return model


@model_idiom()
def only_biases_train() -> nn.Module:
    model = stack(nn.Tanh())
    for name, p in model.named_parameters():
        p.requires_grad_(name.endswith("bias"))
    return model

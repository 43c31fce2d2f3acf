"""Idioms of models: layers, shapes and ways to put them together, small and in float64."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations
from torch.utils.checkpoint import checkpoint

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


def _stack(*middle: nn.Module) -> nn.Module:
    return nn.Sequential(nn.Linear(WIDTH, 8), *middle, nn.Linear(8, OUT))


@model_idiom()
def one_linear_layer() -> nn.Module:
    return nn.Linear(WIDTH, OUT)


@model_idiom()
def deep_narrow_net() -> nn.Module:
    layers = [m for _ in range(6) for m in (nn.Linear(8, 8), nn.ReLU())]
    return _stack(*layers)


@model_idiom()
def dropout() -> nn.Module:
    return _stack(nn.Dropout(0.3), nn.GELU())


@model_idiom()
def alpha_dropout() -> nn.Module:
    return _stack(nn.SELU(), nn.AlphaDropout(0.2))


@model_idiom()
def gaussian_noise_layer() -> nn.Module:
    return Wrap(lambda m, x: m.net(x + 0.1 * torch.randn_like(x)), net=_stack(nn.Tanh()))


@model_idiom()
def batch_norm() -> nn.Module:
    return _stack(nn.BatchNorm1d(8), nn.ReLU())


@model_idiom()
def batch_norm_without_running_statistics() -> nn.Module:
    return _stack(nn.BatchNorm1d(8, track_running_stats=False), nn.ReLU())


@model_idiom()
def batch_norm_in_evaluation() -> nn.Module:
    model = _stack(nn.BatchNorm1d(8), nn.ReLU())
    model[1].eval()
    return model


@model_idiom()
def layer_norm() -> nn.Module:
    return _stack(nn.LayerNorm(8), nn.SiLU())


@model_idiom()
def rms_norm() -> nn.Module:
    return _stack(nn.RMSNorm(8), nn.SiLU())


@model_idiom()
def group_norm() -> nn.Module:
    return _stack(nn.GroupNorm(2, 8), nn.Mish())


@model_idiom()
def weight_norm() -> nn.Module:
    return _stack(nn.Tanh(), parametrizations.weight_norm(nn.Linear(8, 8)))


@model_idiom()
def spectral_norm() -> nn.Module:
    return _stack(nn.Tanh(), parametrizations.spectral_norm(nn.Linear(8, 8)))


@model_idiom()
def orthogonal_layer() -> nn.Module:
    return _stack(nn.Tanh(), parametrizations.orthogonal(nn.Linear(8, 8)))


class _Symmetric(nn.Module):
    def forward(self, w: Tensor) -> Tensor:
        return w.triu() + w.triu(1).T


@model_idiom()
def symmetric_parametrisation() -> nn.Module:
    layer = nn.Linear(8, 8)
    nn.utils.parametrize.register_parametrization(layer, "weight", _Symmetric())
    return _stack(nn.Tanh(), layer)


@model_idiom()
def prelu() -> nn.Module:
    return _stack(nn.PReLU())


@model_idiom()
def activations_of_all_kinds() -> nn.Module:
    kinds = (nn.ELU, nn.Hardswish, nn.Softsign, nn.LeakyReLU, nn.CELU, nn.LogSigmoid, nn.Softplus)
    return _stack(*(kind() for kind in kinds))


@model_idiom()
def in_place_activations() -> nn.Module:
    return _stack(nn.ReLU(inplace=True), nn.Linear(8, 8), nn.SiLU(inplace=True))


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
    model = Wrap(lambda m, x: m.net(x) * m.temperature.exp(), net=_stack(nn.Tanh()))
    model.temperature = nn.Parameter(torch.zeros(()))
    return model


@model_idiom()
def empty_parameter() -> nn.Module:
    model = Wrap(lambda m, x: m.net(x) + m.nothing.sum(), net=_stack(nn.Tanh()))
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
    model = Wrap(lambda m, x: m.net(x), net=_stack(nn.Tanh()))
    model.idle = nn.Parameter(torch.rand(5))
    return model


@model_idiom()
def frozen_first_layer() -> nn.Module:
    model = _stack(nn.Tanh())
    model[0].requires_grad_(False)
    return model


@model_idiom()
def only_biases_train() -> nn.Module:
    model = _stack(nn.Tanh())
    for name, p in model.named_parameters():
        p.requires_grad_(name.endswith("bias"))
    return model


@model_idiom()
def low_rank_adapter() -> nn.Module:
    def forward(m: Any, x: Tensor) -> Tensor:
        return m.base(x) + m.up(m.down(x)) * 2  # type: ignore[no-any-return]

    model = Wrap(
        forward, base=nn.Linear(6, 4), down=nn.Linear(6, 2), up=nn.Linear(2, 4, bias=False)
    )
    model.base.requires_grad_(False)
    return model


@model_idiom()
def layer_used_twice() -> nn.Module:
    return Wrap(
        lambda m, x: m.head(m.body(torch.tanh(m.body(x)))),
        body=nn.Linear(6, 6),
        head=nn.Linear(6, 4),
    )


@model_idiom()
def weight_used_transposed() -> nn.Module:
    return Wrap(
        lambda m, x: m.head(torch.tanh(m.body(x)) @ m.body.weight),
        body=nn.Linear(6, 8),
        head=nn.Linear(6, 4),
    )


@model_idiom()
def running_average_in_a_buffer() -> nn.Module:
    def forward(m: Any, x: Tensor) -> Tensor:
        with torch.no_grad():
            m.mean.lerp_(x.mean(0), 0.1)
        return m.head(x - m.mean)  # type: ignore[no-any-return]

    model = Wrap(forward, head=nn.Linear(6, 4))
    model.register_buffer("mean", torch.zeros(6))
    return model


@model_idiom()
def counter_in_a_buffer() -> nn.Module:
    def forward(m: Any, x: Tensor) -> Tensor:
        m.calls += 1
        return m.head(x) / m.calls  # type: ignore[no-any-return]

    model = Wrap(forward, head=nn.Linear(6, 4))
    model.register_buffer("calls", torch.zeros(()))
    return model


@model_idiom()
def codebook_by_moving_average() -> nn.Module:
    def forward(m: Any, x: Tensor) -> Tensor:
        z = m.body(x)
        near = torch.cdist(z, m.codes).argmin(-1)
        with torch.no_grad():
            hot = F.one_hot(near, 5).to(x.dtype)
            m.codes.mul_(0.9).add_(hot.T @ z, alpha=0.1)
        return m.head(z + (m.codes[near] - z).detach())  # type: ignore[no-any-return]

    model = Wrap(forward, body=nn.Linear(6, 3), head=nn.Linear(3, 4))
    model.register_buffer("codes", torch.randn(5, 3))
    return model


@model_idiom()
def mixture_of_experts_weighted() -> nn.Module:
    def forward(m: Any, x: Tensor) -> Tensor:
        w = m.gate(x).softmax(-1)
        return torch.stack([e(x) for e in m.experts], -1).mul(w[:, None]).sum(-1)

    return Wrap(
        forward, gate=nn.Linear(6, 3), experts=nn.ModuleList(nn.Linear(6, 4) for _ in range(3))
    )


@model_idiom()
def mixture_of_experts_top_one_masked() -> nn.Module:
    def forward(m: Any, x: Tensor) -> Tensor:
        w = m.gate(x).softmax(-1)
        best = w.argmax(-1)
        out = [(best == i)[:, None] * w[:, i : i + 1] * e(x) for i, e in enumerate(m.experts)]
        return sum(out)  # type: ignore[return-value]

    return Wrap(
        forward, gate=nn.Linear(6, 3), experts=nn.ModuleList(nn.Linear(6, 4) for _ in range(3))
    )


@model_idiom()
def hypernetwork() -> nn.Module:
    def forward(m: Any, x: Tensor) -> Tensor:
        w = m.maker(x.mean(0)).view(OUT, WIDTH)
        return F.linear(x, w)

    return Wrap(forward, maker=nn.Linear(WIDTH, OUT * WIDTH))


@model_idiom()
def deep_equilibrium_unrolled() -> nn.Module:
    def forward(m: Any, x: Tensor) -> Tensor:
        z = torch.zeros_like(x)
        for _ in range(4):
            z = torch.tanh(m.body(z) + x)
        return m.head(z)  # type: ignore[no-any-return]

    return Wrap(forward, body=nn.Linear(6, 6), head=nn.Linear(6, 4))


@model_idiom()
def neural_differential_equation() -> nn.Module:
    def forward(m: Any, x: Tensor) -> Tensor:
        for _ in range(3):
            k1 = torch.tanh(m.field(x))
            k2 = torch.tanh(m.field(x + 0.1 * k1))
            x = x + 0.05 * (k1 + k2)
        return m.head(x)  # type: ignore[no-any-return]

    return Wrap(forward, field=nn.Linear(6, 6), head=nn.Linear(6, 4))


@model_idiom()
def checkpointed_block() -> nn.Module:
    def forward(m: Any, x: Tensor) -> Tensor:
        return m.head(checkpoint(m.body, x, use_reentrant=False))  # type: ignore[no-any-return]

    return Wrap(forward, body=_stack(nn.GELU()), head=nn.Linear(4, 4))


@model_idiom()
def checkpointed_dropout() -> nn.Module:
    def forward(m: Any, x: Tensor) -> Tensor:
        return m.head(checkpoint(m.body, x, use_reentrant=False))  # type: ignore[no-any-return]

    return Wrap(forward, body=_stack(nn.Dropout(0.3)), head=nn.Linear(4, 4))


@model_idiom()
def complex_weights() -> nn.Module:
    def forward(m: Any, x: Tensor) -> Tensor:
        z = torch.view_as_complex(torch.stack([m.real(x), m.imaginary(x)], -1))
        return (z * z).abs()

    return Wrap(forward, real=nn.Linear(6, 4), imaginary=nn.Linear(6, 4))


@model_idiom()
def fourier_layer() -> nn.Module:
    def forward(m: Any, x: Tensor) -> Tensor:
        spectrum = torch.fft.rfft(x) * m.filter
        return m.head(torch.fft.irfft(spectrum, n=WIDTH))  # type: ignore[no-any-return]

    model = Wrap(forward, head=nn.Linear(6, 4))
    model.filter = nn.Parameter(torch.rand(4))
    return model


@model_idiom()
def bilinear_layer() -> nn.Module:
    return Wrap(lambda m, x: m.pair(x, x), pair=nn.Bilinear(6, 6, 4))


class _Reverse(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return -0.5 * gradient


@model_idiom()
def gradient_reversal() -> nn.Module:
    return Wrap(
        lambda m, x: m.head(_Reverse.apply(m.body(x))), body=nn.Linear(6, 6), head=nn.Linear(6, 4)
    )


class _Round(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x.round()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return gradient * (x.abs() < 2)


@model_idiom()
def quantisation_aware_layer() -> nn.Module:
    def forward(m: Any, x: Tensor) -> Tensor:
        return F.linear(x, _Round.apply(m.body.weight * 8) / 8, m.body.bias)

    return Wrap(forward, body=nn.Linear(6, 4))


@model_idiom(images)
def convolutions() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Conv2d(4, 4, 3), nn.Flatten(), nn.Linear(64, 4)
    )


@model_idiom(images)
def convolutions_with_batch_norm() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 4, 3, bias=False),
        nn.BatchNorm2d(4),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(4, 4),
    )


@model_idiom(images)
def depthwise_convolutions() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 3, 3, groups=3),
        nn.Conv2d(3, 4, 1),
        nn.AvgPool2d(2),
        nn.Flatten(),
        nn.Linear(36, 4),
    )


@model_idiom(images)
def strided_and_dilated_convolutions() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 4, 3, stride=2), nn.Conv2d(4, 4, 2, dilation=2), nn.Flatten(), nn.Linear(4, 4)
    )


@model_idiom(images)
def transposed_convolutions() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 4, 4, stride=2),
        nn.ConvTranspose2d(4, 2, 2, stride=2),
        nn.Flatten(),
        nn.Linear(72, 4),
    )


@model_idiom(images)
def pooling_of_all_kinds() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 4, 3), nn.MaxPool2d(2), nn.LPPool2d(2, 2), nn.Flatten(), nn.Linear(4, 4)
    )


@model_idiom(images)
def channels_last_images() -> nn.Module:
    def forward(m: Any, x: Tensor) -> Tensor:
        return m.head(m.body(x.to(memory_format=torch.channels_last)).mean((2, 3)))  # type: ignore[no-any-return]

    return Wrap(forward, body=nn.Conv2d(3, 4, 3), head=nn.Linear(4, 4)).to(
        memory_format=torch.channels_last
    )


@model_idiom(images)
def upsampling() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 4, 3, stride=2), nn.Upsample(scale_factor=2), nn.Flatten(), nn.Linear(144, 4)
    )


@model_idiom(images)
def bilinear_interpolation() -> nn.Module:
    def forward(m: Any, x: Tensor) -> Tensor:
        return m.head(F.interpolate(m.body(x), size=4, mode="bilinear").flatten(1))  # type: ignore[no-any-return]

    return Wrap(forward, body=nn.Conv2d(3, 4, 3), head=nn.Linear(64, 4))


@model_idiom(images)
def skip_connections_of_a_u_net() -> nn.Module:
    def forward(m: Any, x: Tensor) -> Tensor:
        a = F.silu(m.down(x))
        b = F.silu(m.deep(F.avg_pool2d(a, 2)))
        return m.head(torch.cat([a, F.interpolate(b, scale_factor=2)], 1)).mean((2, 3))  # type: ignore[no-any-return]

    return Wrap(
        forward,
        down=nn.Conv2d(3, 4, 3, padding=1),
        deep=nn.Conv2d(4, 4, 3, padding=1),
        head=nn.Conv2d(8, 4, 1),
    )


@model_idiom(images)
def patches_of_images() -> nn.Module:
    def forward(m: Any, x: Tensor) -> Tensor:
        return m.head(F.unfold(x, 4, stride=4).transpose(1, 2)).mean(1)  # type: ignore[no-any-return]

    return Wrap(forward, head=nn.Linear(48, 4))


@model_idiom(images)
def pixel_shuffle() -> nn.Module:
    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.PixelShuffle(2), nn.Flatten(), nn.Linear(144, 4))


@model_idiom(images)
def squeeze_and_excitation() -> nn.Module:
    def forward(m: Any, x: Tensor) -> Tensor:
        a = m.body(x)
        return m.head((a * m.gate(a.mean((2, 3))).sigmoid()[:, :, None, None]).mean((2, 3)))  # type: ignore[no-any-return]

    return Wrap(forward, body=nn.Conv2d(3, 4, 3), gate=nn.Linear(4, 4), head=nn.Linear(4, 4))


@model_idiom(images)
def grid_sampling() -> nn.Module:
    def forward(m: Any, x: Tensor) -> Tensor:
        theta = m.locate(x.mean((2, 3))).view(-1, 2, 3)
        grid = F.affine_grid(theta, [len(x), 3, 4, 4], align_corners=False)
        return m.head(F.grid_sample(x, grid, align_corners=False).flatten(1))  # type: ignore[no-any-return]

    return Wrap(forward, locate=nn.Linear(3, 6), head=nn.Linear(48, 4))


@model_idiom(series)
def gru() -> nn.Module:
    return Wrap(
        lambda m, x: m.head(m.body(x)[0][:, -1]),
        body=nn.GRU(6, 5, batch_first=True),
        head=nn.Linear(5, 4),
    )


@model_idiom(series)
def lstm() -> nn.Module:
    return Wrap(
        lambda m, x: m.head(m.body(x)[0][:, -1]),
        body=nn.LSTM(6, 5, batch_first=True),
        head=nn.Linear(5, 4),
    )


@model_idiom(series)
def recurrent_cell_in_a_loop() -> nn.Module:
    def forward(m: Any, x: Tensor) -> Tensor:
        h = x.new_zeros(len(x), 5)
        for t in range(x.shape[1]):
            h = m.cell(x[:, t], h)
        return m.head(h)  # type: ignore[no-any-return]

    return Wrap(forward, cell=nn.GRUCell(6, 5), head=nn.Linear(5, 4))


@model_idiom(series)
def state_space_scan() -> nn.Module:
    def forward(m: Any, x: Tensor) -> Tensor:
        decay, u, h, out = m.decay.sigmoid(), m.body(x), 0.0, []
        for t in range(x.shape[1]):
            h = decay * h + u[:, t]
            out.append(h)
        return m.head(torch.stack(out, 1).mean(1))  # type: ignore[no-any-return]

    model = Wrap(forward, body=nn.Linear(6, 5), head=nn.Linear(5, 4))
    model.decay = nn.Parameter(torch.zeros(5))
    return model


@model_idiom(series)
def linear_attention() -> nn.Module:
    def forward(m: Any, x: Tensor) -> Tensor:
        q, k, v = m.qkv(x).chunk(3, -1)
        context = torch.einsum("btd,bte->bde", k.softmax(1), v)
        return m.head(torch.einsum("btd,bde->bte", q.softmax(-1), context).mean(1))  # type: ignore[no-any-return]

    return Wrap(forward, qkv=nn.Linear(6, 18), head=nn.Linear(6, 4))


@model_idiom(series)
def attention_by_hand() -> nn.Module:
    def forward(m: Any, x: Tensor) -> Tensor:
        q, k, v = m.qkv(x).chunk(3, -1)
        scores = (q @ k.transpose(1, 2) / 6**0.5).masked_fill(
            torch.ones(5, 5).triu(1).bool(), -torch.inf
        )
        return m.head((scores.softmax(-1) @ v).mean(1))  # type: ignore[no-any-return]

    return Wrap(forward, qkv=nn.Linear(6, 18), head=nn.Linear(6, 4))


@model_idiom(series)
def causal_attention() -> nn.Module:
    def forward(m: Any, x: Tensor) -> Tensor:
        q, k, v = (t.unflatten(-1, (2, 3)).transpose(1, 2) for t in m.qkv(x).chunk(3, -1))
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return m.head(out.transpose(1, 2).flatten(2).mean(1))  # type: ignore[no-any-return]

    return Wrap(forward, qkv=nn.Linear(6, 18), head=nn.Linear(6, 4))


@model_idiom(series)
def attention_with_dropout() -> nn.Module:
    def forward(m: Any, x: Tensor) -> Tensor:
        q, k, v = (t.unflatten(-1, (2, 3)).transpose(1, 2) for t in m.qkv(x).chunk(3, -1))
        out = F.scaled_dot_product_attention(q, k, v, dropout_p=0.2)
        return m.head(out.transpose(1, 2).flatten(2).mean(1))  # type: ignore[no-any-return]

    return Wrap(forward, qkv=nn.Linear(6, 18), head=nn.Linear(6, 4))


@model_idiom(series)
def multi_head_attention_module() -> nn.Module:
    return Wrap(
        lambda m, x: m.head(m.body(x, x, x, need_weights=False)[0].mean(1)),
        body=nn.MultiheadAttention(6, 2, batch_first=True),
        head=nn.Linear(6, 4),
    )


@model_idiom(series)
def transformer_encoder_layer() -> nn.Module:
    layer = nn.TransformerEncoderLayer(6, 2, 8, dropout=0.0, batch_first=True)
    return Wrap(lambda m, x: m.head(m.body(x).mean(1)), body=layer, head=nn.Linear(6, 4))


@model_idiom(series)
def transformer_encoder_with_dropout() -> nn.Module:
    layer = nn.TransformerEncoderLayer(6, 2, 8, dropout=0.2, batch_first=True, norm_first=True)
    return Wrap(lambda m, x: m.head(m.body(x).mean(1)), body=layer, head=nn.Linear(6, 4))


@model_idiom(series)
def rotary_positions() -> nn.Module:
    def forward(m: Any, x: Tensor) -> Tensor:
        h = m.body(x)
        angle = torch.arange(5, dtype=x.dtype)[:, None] * torch.tensor([1.0, 0.1, 0.01]).to(x.dtype)
        a, b = h.chunk(2, -1)
        turned = torch.cat(
            [a * angle.cos() - b * angle.sin(), a * angle.sin() + b * angle.cos()], -1
        )
        return m.head(turned.mean(1))  # type: ignore[no-any-return]

    return Wrap(forward, body=nn.Linear(6, 6), head=nn.Linear(6, 4))


@model_idiom(series)
def temporal_convolution() -> nn.Module:
    def forward(m: Any, x: Tensor) -> Tensor:
        return m.head(m.body(F.pad(x.transpose(1, 2), (2, 0))).mean(-1))  # type: ignore[no-any-return]

    return Wrap(forward, body=nn.Conv1d(6, 5, 3), head=nn.Linear(5, 4))


@model_idiom(series)
def graph_convolution() -> nn.Module:
    def forward(m: Any, x: Tensor) -> Tensor:
        near = (torch.cdist(x, x) < 3).to(x.dtype)
        return m.head((near / near.sum(-1, keepdim=True)) @ m.body(x)).mean(1)  # type: ignore[no-any-return]

    return Wrap(forward, body=nn.Linear(6, 5), head=nn.Linear(5, 4))


@model_idiom(series)
def messages_by_scatter() -> nn.Module:
    def forward(m: Any, x: Tensor) -> Tensor:
        h = m.body(x)
        to = torch.tensor([0, 0, 1, 1, 2])
        return m.head(torch.zeros(len(x), 3, 5, dtype=x.dtype).index_add(1, to, h).sum(1))  # type: ignore[no-any-return]

    return Wrap(forward, body=nn.Linear(6, 5), head=nn.Linear(5, 4))


@model_idiom(series)
def attention_pooling() -> nn.Module:
    def forward(m: Any, x: Tensor) -> Tensor:
        return m.head((m.score(x).softmax(1) * x).sum(1))  # type: ignore[no-any-return]

    return Wrap(forward, score=nn.Linear(6, 1), head=nn.Linear(6, 4))


def _language_model(body: nn.Module | None = None, *, tied: bool = False) -> nn.Module:
    parts = [nn.Embedding(16, 8), body or nn.Tanh(), nn.Linear(8, 16, bias=False)]
    if tied:
        parts[2].weight = parts[0].weight  # type: ignore[assignment]
    return nn.Sequential(*parts)


@model_idiom(tokens, next_token)
def embedding() -> nn.Module:
    return _language_model()


@model_idiom(tokens, next_token)
def tied_embedding() -> nn.Module:
    return _language_model(tied=True)


@model_idiom(tokens, next_token)
def embedding_with_padding() -> nn.Module:
    return nn.Sequential(nn.Embedding(16, 8, padding_idx=0), nn.Tanh(), nn.Linear(8, 16))


@model_idiom(tokens, next_token)
def embedding_with_max_norm() -> nn.Module:
    return nn.Sequential(nn.Embedding(16, 8, max_norm=1.0), nn.Tanh(), nn.Linear(8, 16))


@model_idiom(tokens, next_token)
def embedding_scaled_by_frequency() -> nn.Module:
    return nn.Sequential(nn.Embedding(16, 8, scale_grad_by_freq=True), nn.Tanh(), nn.Linear(8, 16))


@model_idiom(tokens, next_token)
def learned_positions() -> nn.Module:
    model = Wrap(
        lambda m, x: m.head(m.table(x) + m.positions[: x.shape[1]]),
        table=nn.Embedding(16, 8),
        head=nn.Linear(8, 16),
    )
    model.positions = nn.Parameter(torch.zeros(9, 8))
    return model


@model_idiom(tokens, next_token)
def one_hot_in_place_of_embedding() -> nn.Module:
    return Wrap(
        lambda m, x: m.head(F.one_hot(x, 16).to(m.head.weight.dtype)), head=nn.Linear(16, 16)
    )


@model_idiom(tokens, next_token)
def token_dropout() -> nn.Module:
    def forward(m: Any, x: Tensor) -> Tensor:
        kept = torch.rand(x.shape) > 0.2
        return m.head(m.table(torch.where(kept, x, 0)))  # type: ignore[no-any-return]

    return Wrap(forward, table=nn.Embedding(16, 8), head=nn.Linear(8, 16))


@model_idiom(tokens, next_token)
def bag_of_words() -> nn.Module:
    return Wrap(
        lambda m, x: m.head(m.table(x))[:, None].expand(-1, 5, -1),
        table=nn.EmbeddingBag(16, 8, mode="mean"),
        head=nn.Linear(8, 16),
    )


@model_idiom(tokens, next_token)
def float32_head_on_float64_body() -> nn.Module:
    return Wrap(
        lambda m, x: m.head(m.table(x).float()).double(),
        table=nn.Embedding(16, 8),
        head=_Float32(8, 16),
    )


class _Float32(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight.float(), self.bias.float())

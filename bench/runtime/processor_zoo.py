"""The zoo of `processor_steps`: small steps of many kinds, of 4 milliseconds to half a second.

Two lists, the second with layers, shapes, dtypes and optimizers that the first has not. No constant
is fitted on either but what an op takes in a step beside itself (`op_rates`), on the first. Which
classes of ops are measured, and with what in the caches, was chosen with both in view.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from bench.runtime.simulated_vs_measured import Build, char_gpt, llama, mlp, step_of

Step = tuple[Callable[..., Any], tuple[Any, ...]]


def narrow() -> Step:
    """Six layers of 128 x 128: hundreds of ops that compute next to nothing."""
    model = nn.Sequential(*[nn.Sequential(nn.Linear(128, 128), nn.ReLU()) for _ in range(6)])
    return _step(model, F.mse_loss), (torch.randn(32, 128), torch.randn(32, 128))


def images() -> Step:
    """A small network of images with batch norms."""
    parts: list[nn.Module] = []
    for channels, more, stride in ((3, 32, 1), (32, 64, 2), (64, 64, 1)):
        convolution = nn.Conv2d(channels, more, 3, stride=stride, padding=1)
        parts += [convolution, nn.BatchNorm2d(more), nn.ReLU()]
    model = nn.Sequential(*parts, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 10))
    return _step(model, F.cross_entropy), _images(16, 32)


def bert() -> Step:
    """Three narrow layers of BERT, with dropout."""
    from transformers import BertConfig, BertForSequenceClassification

    config = BertConfig(
        hidden_size=128,
        num_attention_heads=4,
        intermediate_size=512,
        num_hidden_layers=3,
        vocab_size=1000,
    )
    model: Any = BertForSequenceClassification(config)

    def loss(x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(model(input_ids=x).logits, y)

    return step_of(loss, model), (torch.randint(0, 1000, (8, 64)), torch.randint(0, 2, (8,)))


def vit() -> Step:
    """Vision transformer: 64 patches of an image and four layers, with torch's attention."""
    layers = (nn.TransformerEncoderLayer(**_LAYER, batch_first=True) for _ in range(4))
    model = nn.Sequential(_Patches(192, 8), *layers, _Mean(), nn.Linear(192, 10))
    return _step(model, F.cross_entropy), _images(4, 64)


def t5() -> Step:
    """Encoder and decoder with dropout, and attention by hand with a learnt bias."""
    from transformers import T5Config, T5ForConditionalGeneration

    config: Any = T5Config(  # type: ignore[call-arg, unused-ignore]
        d_model=192,
        d_kv=32,
        d_ff=512,
        num_layers=2,
        num_heads=6,
        vocab_size=3000,
        decoder_start_token_id=0,
    )
    model: Any = T5ForConditionalGeneration(config)

    def loss(x: Tensor, y: Tensor) -> Tensor:
        found: Tensor = model(input_ids=x, labels=y).loss
        return found

    return step_of(loss, model), (torch.randint(2, 3000, (4, 64)), torch.randint(2, 3000, (4, 32)))


def depthwise() -> Step:
    """A network of images whose wide convolutions have a filter for each channel, and SGD."""
    parts: list[nn.Module] = [_convolution(3, 32, 3, stride=2)]
    for channels, more, stride in ((32, 64, 1), (64, 96, 2), (96, 96, 1), (96, 160, 2)):
        inner = 3 * channels
        parts += [
            _convolution(channels, inner, 1),
            _convolution(inner, inner, 3, stride=stride, groups=inner),
            _convolution(inner, more, 1),
        ]
    model = nn.Sequential(*parts, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(160, 10))
    return _sgd(model, F.cross_entropy), _images(8, 64)


def residual() -> Step:
    """Residual blocks of images that are channels last."""
    blocks = (_Residual(channels) for channels in (32, 32, 32))
    model: Any = nn.Sequential(
        _convolution(3, 32, 3), *blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, 10)
    )
    model = model.to(memory_format=torch.channels_last)
    x, y = _images(8, 32)
    return _sgd(model, F.cross_entropy), (x.contiguous(memory_format=torch.channels_last), y)


def mixer() -> Step:
    """Products over places and over channels in turn."""
    model = nn.Sequential(
        _Patches(256, 8), *(_Mixer(64, 256) for _ in range(4)), _Mean(), nn.Linear(256, 10)
    )
    return _step(model, F.cross_entropy), _images(4, 64)


def words() -> Step:
    """A large vocabulary over a thin model: what it takes is the table and the loss."""
    model = nn.Sequential(
        nn.Embedding(16000, 96),
        nn.Linear(96, 96),
        nn.Tanh(),
        nn.Linear(96, 16000),
        nn.Flatten(0, 1),
    )
    x, y = (torch.randint(0, 16000, (4, 32)) for _ in range(2))
    return _step(model, lambda out, y: F.cross_entropy(out, y.flatten())), (x, y)


def brain_floats() -> Step:
    """A transformer under autocast in bfloat16."""
    model = nn.Sequential(
        *(nn.TransformerEncoderLayer(**_LAYER, batch_first=True) for _ in range(2))
    )

    def loss(x: Tensor, y: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return F.mse_loss(model(x).float(), y)

    return step_of(loss, model), (torch.randn(4, 64, 192), torch.randn(4, 64, 192))


def doubles() -> Step:
    """A network for numbers in float64, as physics has it."""
    model = nn.Sequential(
        *(nn.Sequential(nn.Linear(256, 256), nn.Tanh(), nn.LayerNorm(256)) for _ in range(5))
    ).double()
    x, y = (torch.randn(256, 256, dtype=torch.float64) for _ in range(2))
    return _step(model, F.smooth_l1_loss), (x, y)


_LAYER: Mapping[str, Any] = {
    "d_model": 192,
    "nhead": 6,
    "dim_feedforward": 768,
    "activation": "gelu",
}


class _Patches(nn.Module):
    def __init__(self, width: int, side: int) -> None:
        super().__init__()
        self.cut = nn.Conv2d(3, width, side, stride=side)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.cut(x).flatten(2).transpose(1, 2)
        return found


class _Mean(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.mean(1)


class _Mixer(nn.Module):
    def __init__(self, places: int, width: int) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2))
        self.over_places, self.over_channels = _perceptron(places), _perceptron(width)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.over_places(self.norms[0](x).transpose(1, 2)).transpose(1, 2)
        found: Tensor = x + self.over_channels(self.norms[1](x))
        return found


def _perceptron(width: int) -> nn.Module:
    return nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))


class _Residual(nn.Module):
    def __init__(self, channels: int) -> None:
        super().__init__()
        self.first, self.second = (_convolution(channels, channels, 3) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(x + self.second(self.first(x)))


def _convolution(channels: int, more: int, side: int, **given: Any) -> nn.Module:
    convolution = nn.Conv2d(channels, more, side, padding=side // 2, bias=False, **given)
    return nn.Sequential(convolution, nn.BatchNorm2d(more), nn.ReLU6())


def _images(count: int, side: int) -> tuple[Tensor, Tensor]:
    return torch.randn(count, 3, side, side), torch.randint(0, 10, (count,))


def _step(model: nn.Module, compare: Callable[..., Tensor]) -> Callable[..., Any]:
    return step_of(lambda x, y: compare(model(x), y), model)


def _sgd(model: nn.Module, compare: Callable[..., Tensor]) -> Callable[..., Any]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

    def step(x: Tensor, y: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss = compare(model(x), y)
        loss.backward()
        optimizer.step()
        return loss

    return step


FIRST: Mapping[str, Build] = {
    "narrow MLP": narrow,
    "MLP": mlp,
    "images": images,
    "BERT": bert,
    "character GPT": char_gpt,
    "Llama": llama,
}
SECOND: Mapping[str, Build] = {
    "ViT": vit,
    "T5": t5,
    "depthwise": depthwise,
    "residual, channels last": residual,
    "MLP-Mixer": mixer,
    "16,000 words": words,
    "bfloat16": brain_floats,
    "float64": doubles,
}

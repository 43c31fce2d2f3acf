"""More jobs for `bench.plans.recompute`: steps that are no language models of equal layers.

A vision transformer, a U-Net, a mixture of experts, and two convolutional nets of the tables of
MONeT (Shah et al., ICLR 2021). Each function returns a step and its arguments, as a job does.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

Job = tuple[Callable[..., Tensor], tuple[Any, ...]]


def _step(model: nn.Module, mixed: bool = True) -> Callable[[Tensor, Tensor], Tensor]:
    """A step of AdamW for classes of images, or of their pixels; `mixed`: bfloat16 autocast."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)

    def step(x: Tensor, classes: Tensor) -> Tensor:
        optimizer.zero_grad()
        with torch.autocast(x.device.type, torch.bfloat16, enabled=mixed):
            loss = F.cross_entropy(model(x).float(), classes)
        loss.backward()
        optimizer.step()
        return loss

    return step


class _Attention(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads, self.qkv, self.out = heads, nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4).unbind(0)
        mixed = F.scaled_dot_product_attention(q, k, v)
        found: Tensor = self.out(mixed.transpose(1, 2).flatten(2))
        return found


class _Block(nn.Module):
    """A block of a transformer; `inner` is what follows its attention."""

    def __init__(self, width: int, heads: int, inner: nn.Module) -> None:
        super().__init__()
        self.before, self.attention = nn.LayerNorm(width), _Attention(width, heads)
        self.between, self.inner = nn.LayerNorm(width), inner

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.before(x))
        found: Tensor = x + self.inner(self.between(x))
        return found


def _mlp(width: int, hidden: int) -> nn.Module:
    return nn.Sequential(nn.Linear(width, hidden), nn.GELU(), nn.Linear(hidden, width))


class _ViT(nn.Module):
    def __init__(self, width: int, layers: int, heads: int, patches: int) -> None:
        super().__init__()
        self.patch = nn.Conv2d(3, width, 16, 16)
        self.place = nn.Parameter(torch.zeros(patches, width))
        self.blocks = nn.ModuleList(
            _Block(width, heads, _mlp(width, 4 * width)) for _ in range(layers)
        )
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 1000)

    def forward(self, images: Tensor) -> Tensor:
        x = self.patch(images).flatten(2).transpose(1, 2) + self.place
        for block in self.blocks:
            x = block(x)
        found: Tensor = self.head(self.norm(x.mean(1)))
        return found


def vit_l() -> Job:
    """ViT-L/16 (Dosovitskiy et al., ICLR 2021), 304M parameters, 128 images of 224 x 224."""
    model = _ViT(1024, 24, 16, 196)
    return _step(model), (torch.empty(128, 3, 224, 224), torch.zeros(128, dtype=torch.int64))


class _Experts(nn.Module):
    """Two of eight experts for a token, each with room for a share (GShard, arXiv 2006.16668).

    Where a token goes is a matrix: no size depends on data.
    """

    def __init__(self, width: int, hidden: int, experts: int) -> None:
        super().__init__()
        self.gate = nn.Linear(width, experts, bias=False)
        self.up = nn.Parameter(torch.empty(experts, width, hidden))
        self.down = nn.Parameter(torch.empty(experts, hidden, width))

    def forward(self, x: Tensor) -> Tensor:
        tokens = x.flatten(0, 1)
        count, experts = tokens.shape[0], self.up.shape[0]
        room = 2 * count // experts
        shares, chosen = self.gate(tokens).float().softmax(-1).topk(room, dim=0)
        picked = tokens[chosen.T.flatten()].unflatten(0, (experts, room))
        done = torch.bmm(F.gelu(torch.bmm(picked, self.up)), self.down)
        done = done * shares.T.unsqueeze(-1).to(done.dtype)
        found = torch.zeros_like(tokens, dtype=done.dtype)
        return found.index_add(0, chosen.T.flatten(), done.flatten(0, 1)).view_as(x)


class _MoE(nn.Module):
    def __init__(self, width: int, layers: int, heads: int, words: int) -> None:
        super().__init__()
        self.words = nn.Embedding(words, width)
        self.blocks = nn.ModuleList(
            _Block(width, heads, _Experts(width, 4 * width, 8) if i % 2 else _mlp(width, 4 * width))
            for i in range(layers)
        )
        self.head = nn.Linear(width, words, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.words(tokens)
        for block in self.blocks:
            x = block(x)
        found: Tensor = self.head(x).transpose(1, 2)
        return found


def mixture() -> Job:
    """A transformer of 12 blocks, every other one with 8 experts, 520M parameters, 8 x 1024."""
    tokens = torch.zeros(8, 1024, dtype=torch.int64)
    return _step(_MoE(1024, 12, 16, 32000)), (tokens, tokens)


def _convolutions(before: int, after: int) -> nn.Module:
    layers: list[nn.Module] = []
    for width in (before, after):
        layers += [nn.Conv2d(width, after, 3, padding=1), nn.BatchNorm2d(after), nn.ReLU()]
    return nn.Sequential(*layers)


class _UNet(nn.Module):
    """U-Net (Ronneberger et al., MICCAI 2015) with batch norm and padding."""

    def __init__(self, classes: int = 2) -> None:
        super().__init__()
        widths = (64, 128, 256, 512, 1024)
        befores = (3, *widths[:-1])
        self.down = nn.ModuleList(_convolutions(a, b) for a, b in zip(befores, widths, strict=True))
        pairs = list(zip(widths[:0:-1], widths[-2::-1], strict=True))
        self.up = nn.ModuleList(nn.ConvTranspose2d(a, b, 2, 2) for a, b in pairs)
        self.join = nn.ModuleList(_convolutions(a, b) for a, b in pairs)
        self.head = nn.Conv2d(64, classes, 1)

    def forward(self, x: Tensor) -> Tensor:
        skipped = []
        for number, part in enumerate(self.down):
            x = part(F.max_pool2d(x, 2) if number else x)
            skipped.append(x)
        for up, join, beside in zip(self.up, self.join, skipped[-2::-1], strict=True):
            x = join(torch.cat((beside, up(x)), 1))
        found: Tensor = self.head(x)
        return found


def unet() -> Job:
    """U-Net, 31M parameters, 16 images of 512 x 512, in float32."""
    images, classes = torch.empty(16, 3, 512, 512), torch.zeros(16, 512, 512, dtype=torch.int64)
    return _step(_UNet(), mixed=False), (images, classes)


class _Bottleneck(nn.Module):
    def __init__(self, before: int, width: int, stride: int) -> None:
        super().__init__()
        after = 4 * width
        self.inner = nn.Sequential(
            *(nn.Conv2d(before, width, 1, bias=False), nn.BatchNorm2d(width), nn.ReLU()),
            *(nn.Conv2d(width, width, 3, stride, 1, bias=False), nn.BatchNorm2d(width), nn.ReLU()),
            *(nn.Conv2d(width, after, 1, bias=False), nn.BatchNorm2d(after)),
        )
        self.beside: nn.Module = nn.Identity()
        if stride > 1 or before != after:
            narrow = nn.Conv2d(before, after, 1, stride, bias=False)
            self.beside = nn.Sequential(narrow, nn.BatchNorm2d(after))

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.inner(x) + self.beside(x))


def resnet50() -> Job:
    """ResNet-50, 184 images of 224 x 224 in float32: MONeT's table."""

    def blocks() -> Iterator[nn.Module]:
        before = 64
        for stage, count in enumerate((3, 4, 6, 3)):
            for number in range(count):
                width = 64 << stage
                yield _Bottleneck(before, width, 2 if stage and not number else 1)
                before = 4 * width

    stem = [nn.Conv2d(3, 64, 7, 2, 3, bias=False), nn.BatchNorm2d(64), nn.ReLU()]
    pool = [nn.MaxPool2d(3, 2, 1)]
    head = [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(2048, 1000)]
    model = nn.Sequential(*stem, *pool, *blocks(), *head)
    images, classes = torch.empty(184, 3, 224, 224), torch.zeros(184, dtype=torch.int64)
    return _step(model, mixed=False), (images, classes)


def vgg16() -> Job:
    """VGG-16 with batch norm, 176 images of 224 x 224 in float32: MONeT's table."""
    layers: list[nn.Module] = []
    before = 3
    for stage, count in enumerate((2, 2, 3, 3, 3)):
        width = min(64 << stage, 512)
        for _ in range(count):
            layers += [nn.Conv2d(before, width, 3, padding=1), nn.BatchNorm2d(width), nn.ReLU()]
            before = width
        layers.append(nn.MaxPool2d(2))
    head = [nn.Flatten(), nn.Linear(512 * 49, 4096), nn.ReLU(), nn.Linear(4096, 4096), nn.ReLU()]
    model = nn.Sequential(*layers, *head, nn.Linear(4096, 1000))
    images, classes = torch.empty(176, 3, 224, 224), torch.zeros(176, dtype=torch.int64)
    return _step(model, mixed=False), (images, classes)


# Users' own checkpoints.


def checkpointed(build: Callable[[], Job], every: int) -> Callable[[], Job]:
    """The job `build` with every so many of its layers under `torch.utils.checkpoint`.

    Layers are those of the longest list of modules in the model that the step closes over.
    """

    def build_again() -> Job:
        step, arguments = build()
        cells: tuple[Any, ...] = getattr(step, "__closure__", None) or ()
        (model,) = (c.cell_contents for c in cells if isinstance(c.cell_contents, nn.Module))
        lists = [[*m] for m in model.modules() if isinstance(m, nn.ModuleList)]
        for layer in max(lists, key=len)[::every]:
            layer.forward = _again(layer.forward)
        return step, arguments

    return build_again


def _again(forward: Callable[..., Any]) -> Callable[..., Any]:
    def run(*args: Any, **kwargs: Any) -> Any:
        return checkpoint(forward, *args, use_reentrant=False, **kwargs)

    return run

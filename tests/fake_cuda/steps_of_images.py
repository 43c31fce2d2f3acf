"""Steps of models of images: stochastic depth, a denoiser, a student that its average teaches."""

from __future__ import annotations

import copy
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.fake_cuda.steps import CARD, Job, fit, named

WIDTH, HEADS, CLASSES = 32, 2, 10
SIDE, PATCH = 16, 4


class DropPath(nn.Module):
    """Stochastic depth as timm has it: a branch is left out for some samples."""

    def __init__(self, rate: float) -> None:
        super().__init__()
        self.rate = rate

    def forward(self, x: Tensor) -> Tensor:
        if self.rate == 0.0 or not self.training:
            return x
        keep = 1 - self.rate
        mask = x.new_empty((x.shape[0],) + (1,) * (x.ndim - 1)).bernoulli_(keep)
        if keep > 0.0:
            mask.div_(keep)
        return x * mask


class Attention(nn.Module):
    """Self-attention with normed queries and keys, or of queries to a context of another width."""

    def __init__(self, width: int, context: int | None = None, norm: bool = False) -> None:
        super().__init__()
        self.query = nn.Linear(width, width)
        self.key_value = nn.Linear(context or width, 2 * width)
        self.output = nn.Linear(width, width)
        normed = nn.LayerNorm(width // HEADS)
        self.query_norm, self.key_norm = (
            copy.copy(normed) if norm else nn.Identity() for _ in "qk"
        )

    def forward(self, x: Tensor, context: Tensor | None = None) -> Tensor:
        source = x if context is None else context
        query = self.query(x).unflatten(-1, (HEADS, -1)).transpose(1, 2)
        parts = self.key_value(source).unflatten(-1, (2, HEADS, -1)).permute(2, 0, 3, 1, 4)
        key, value = parts.unbind(0)
        mixed = F.scaled_dot_product_attention(self.query_norm(query), self.key_norm(key), value)
        return self.output(mixed.transpose(1, 2).flatten(2))  # type: ignore[no-any-return]


class Block(nn.Module):
    """A block of a ViT with scaled and dropped branches."""

    def __init__(self, rate: float) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.attention = Attention(WIDTH, norm=True)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 64), nn.GELU(), nn.Linear(64, WIDTH))
        self.gamma = nn.Parameter(1e-5 * torch.ones(WIDTH))
        self.drop_path = DropPath(rate)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.drop_path(self.gamma * self.attention(self.norm1(x)))
        return x + self.drop_path(self.mlp(self.norm2(x)))  # type: ignore[no-any-return]


class ViT(nn.Module):
    """Patches, a class token and positions, blocks whose rates are read off a tensor, a head."""

    def __init__(self, depth: int = 2, drop_path: float = 0.1, classes: int = CLASSES) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, WIDTH, PATCH, PATCH)
        self.cls = nn.Parameter(torch.zeros(1, 1, WIDTH))
        self.positions = nn.Parameter(torch.zeros(1, (SIDE // PATCH) ** 2, WIDTH))
        nn.init.trunc_normal_(self.positions, std=0.02)
        rates = [rate.item() for rate in torch.linspace(0, drop_path, depth)]
        self.blocks = nn.Sequential(*(Block(rate) for rate in rates))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, classes)

    def forward(self, x: Tensor) -> Tensor:
        tokens = self.patches(x).flatten(2).transpose(1, 2)
        side = tokens.shape[1]
        positions: Tensor = self.positions
        if side != positions.shape[1]:  # a crop of another size
            grid = positions.transpose(1, 2).unflatten(-1, (SIDE // PATCH, -1))
            edge = int(side**0.5)
            grid = F.interpolate(grid, size=(edge, edge), mode="bicubic", antialias=True)
            positions = grid.flatten(2).transpose(1, 2)
        tokens = torch.cat([self.cls.expand(len(x), -1, -1), tokens + positions], 1)
        return self.head(self.norm(self.blocks(tokens))[:, 0])  # type: ignore[no-any-return]


def images(side: int = SIDE) -> Tensor:
    return torch.randn(4, 3, side, side, device=CARD)


def classes() -> Tensor:
    return torch.randint(0, CLASSES, (4,), device=CARD)


@named("ViT with stochastic depth")
def vit() -> Job:
    """As timm trains one: images and classes mixed on the card, targets smoothed."""
    with torch.device(CARD):
        model = ViT()

    def loss_of(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        share = torch.rand((), device=x.device)
        x = x * share + x.flip(0) * (1 - share)
        target = F.one_hot(y, CLASSES).float()
        return F.cross_entropy(
            model(x), target * share + target.flip(0) * (1 - share), label_smoothing=0.1
        )

    return fit(model, loss_of, (images(), classes()))


def swin(low: torch.dtype | None) -> Job:
    """Hugging Face's: shifted windows, masks of windows, merged patches, dropped paths."""
    from transformers import SwinConfig, SwinForImageClassification

    config = SwinConfig(
        image_size=32,
        patch_size=2,
        embed_dim=16,
        depths=[2, 2],
        num_heads=[2, 4],
        window_size=4,
        drop_path_rate=0.2,
    )
    config.num_labels = CLASSES
    with torch.device(CARD):
        model = SwinForImageClassification(config)
    model.train()

    def loss_of(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        return model(pixel_values=x, labels=y).loss  # type: ignore[no-any-return]

    return fit(model, loss_of, (images(32), classes()), low=low)


@named("Swin")
def swin_in_bfloat16() -> Job:
    return swin(torch.bfloat16)


@named("Swin in float32")
def swin_in_float32() -> Job:
    return swin(None)


# A denoiser as SDXL's: residual blocks that know the time, transformers that look at the text.


class Residual(nn.Module):
    def __init__(self, inputs: int, outputs: int, time: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.GroupNorm(4, inputs), nn.GroupNorm(4, outputs)
        self.conv1 = nn.Conv2d(inputs, outputs, 3, padding=1)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, padding=1)
        self.time = nn.Linear(time, outputs)
        self.skip = nn.Conv2d(inputs, outputs, 1) if inputs != outputs else nn.Identity()

    def forward(self, x: Tensor, time: Tensor) -> Tensor:
        h = self.conv1(F.silu(self.norm1(x)))
        h = h + self.time(F.silu(time))[:, :, None, None]
        return self.skip(x) + self.conv2(F.silu(self.norm2(h)))  # type: ignore[no-any-return]


class SpatialTransformer(nn.Module):
    """Self-attention, attention to the text and a gated layer, over the pixels."""

    def __init__(self, width: int, text: int) -> None:
        super().__init__()
        self.norm = nn.GroupNorm(4, width)
        self.inputs, self.outputs = nn.Linear(width, width), nn.Linear(width, width)
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(3))
        self.own, self.cross = Attention(width), Attention(width, text)
        self.gated, self.down = nn.Linear(width, 4 * width), nn.Linear(2 * width, width)

    def forward(self, x: Tensor, text: Tensor) -> Tensor:
        height = x.shape[2]
        h = self.inputs(self.norm(x).flatten(2).transpose(1, 2))
        h = h + self.own(self.norms[0](h))
        h = h + self.cross(self.norms[1](h), text)
        value, gate = self.gated(self.norms[2](h)).chunk(2, -1)
        h = h + self.down(value * F.gelu(gate))
        return x + self.outputs(h).transpose(1, 2).unflatten(-1, (height, -1))  # type: ignore[no-any-return]


class UNet(nn.Module):
    """Two scales with a skip between them, conditioned on time, text, and sizes as SDXL is."""

    def __init__(self, width: int = 16, text: int = 24) -> None:
        super().__init__()
        self.time = nn.Sequential(nn.Linear(16, 32), nn.SiLU(), nn.Linear(32, 32))
        self.sizes = nn.Sequential(nn.Linear(6 * 16 + text, 32), nn.SiLU(), nn.Linear(32, 32))
        self.inputs = nn.Conv2d(4, width, 3, padding=1)
        self.fine, self.coarse = Residual(width, width, 32), Residual(width, 2 * width, 32)
        self.down = nn.Conv2d(width, width, 3, stride=2, padding=1)
        self.middle = SpatialTransformer(2 * width, text)
        self.up = nn.Conv2d(2 * width, 2 * width, 3, padding=1)
        self.join = Residual(3 * width, width, 32)
        self.norm, self.outputs = nn.GroupNorm(4, width), nn.Conv2d(width, 4, 3, padding=1)

    def forward(self, x: Tensor, t: Tensor, text: Tensor, pooled: Tensor, sizes: Tensor) -> Tensor:
        known = torch.cat([pooled, waves(sizes.flatten()).view(len(x), -1)], -1)
        time = self.time(waves(t).to(x.dtype)) + self.sizes(known.to(x.dtype))
        fine = self.fine(self.inputs(x), time)
        h = self.middle(self.coarse(self.down(fine), time), text)
        h = self.up(F.interpolate(h, scale_factor=2.0, mode="nearest"))
        h = self.join(torch.cat([h, fine], 1), time)
        return self.outputs(F.silu(self.norm(h)))  # type: ignore[no-any-return]


def waves(numbers: Tensor) -> Tensor:
    """Sines and cosines of each number, 16 in all."""
    rates = torch.exp(-torch.arange(8, dtype=torch.float32, device=numbers.device))
    angles = numbers[:, None].float() * rates
    return torch.cat([angles.sin(), angles.cos()], -1)


@named("U-Net with cross attention")
def unet() -> Job:
    """Noise at random times by a table of the schedule, weighted by their ratio (Min-SNR)."""
    with torch.device(CARD):
        model = UNet()
        kept = torch.cumprod(1 - torch.linspace(0.00085**0.5, 0.012**0.5, 1000) ** 2, 0)
    model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]

    def loss_of(model: nn.Module, x: Tensor, text: Tensor, pooled: Tensor, sizes: Tensor) -> Tensor:
        noise = torch.randn_like(x)
        noise = noise + 0.05 * torch.randn(len(x), 4, 1, 1, device=x.device)
        t = torch.randint(0, 1000, (len(x),), device=x.device)
        share = kept[t].view(-1, 1, 1, 1)
        noisy = share.sqrt() * x + (1 - share).sqrt() * noise
        found = model(noisy, t, text, pooled, sizes)
        ratio = (share / (1 - share)).flatten()
        weight = torch.stack([ratio, 5 * torch.ones_like(ratio)], 1).min(1).values / ratio
        return (F.mse_loss(found.float(), noise, reduction="none").mean((1, 2, 3)) * weight).mean()

    with torch.device(CARD):
        batch = (torch.randn(2, 4, 8, 8), torch.randn(2, 7, 24), torch.randn(2, 24))
        sizes = torch.randint(0, 1024, (2, 6))
    return fit(model, loss_of, (*batch, sizes))


# A student that learns from its own average (DINO).


@named("DINO with an EMA teacher")
def dino() -> Job:
    """Two large crops and two small ones; the teacher is centered, and follows the student."""
    with torch.device(CARD):
        student, teacher = (ViT(drop_path=rate, classes=16) for rate in (0.1, 0.0))
        center = torch.zeros(1, 16)
    teacher.load_state_dict(student.state_dict())
    teacher.requires_grad_(False)
    teacher.eval()

    def loss_of(student: nn.Module, large: Tensor, small: Tensor, temperature: Tensor) -> Tensor:
        given = torch.cat([student(large), student(small)]) / 0.1
        with torch.no_grad():
            taught = teacher(large).float()
            targets = F.softmax((taught - center) / temperature, -1).chunk(2)
            center.mul_(0.9).add_(taught.mean(0, keepdim=True), alpha=0.1)
        views: Any = F.log_softmax(given.float(), -1).chunk(4)
        pairs = [(i, j) for i in range(2) for j in range(4) if i != j]
        losses = [-(targets[i] * views[j]).sum(-1).mean() for i, j in pairs]
        return torch.stack(losses).mean()

    @torch.no_grad()
    def follow() -> None:
        for slow, fast in zip(teacher.parameters(), student.parameters(), strict=True):
            slow.data.mul_(0.996).add_((1 - 0.996) * fast.detach().data)

    temperature = torch.full((), 0.04, device=CARD)
    batch = (torch.cat([images(), images()]), torch.cat([images(8), images(8)]), temperature)
    return fit(student, loss_of, batch, after=follow)

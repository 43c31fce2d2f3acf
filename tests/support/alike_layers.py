"""Models whose layers are alike, or differ in one way, and steps that train them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

WIDTH, LAYERS = 4, 9
Build = Callable[[], tuple[Callable[..., Any], tuple[Any, ...]]]


class Layer(nn.Module):
    """The least that is a layer: it has what a test may make otherwise in one of many."""

    def __init__(self, width: int = WIDTH, *, drop: float = 0.0, scale: float = 1.0) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, width)
        self.back = nn.Linear(width, WIDTH, bias=False) if width != WIDTH else nn.Identity()
        self.dropout, self.scale = nn.Dropout(drop), scale

    def forward(self, x: Tensor) -> Tensor:
        y = self.dropout(torch.tanh(self.linear(x)))
        scaled: Tensor = self.scale * self.back(y)
        return x + scaled


class Model(nn.Module):
    """Layers one behind the other."""

    def __init__(self, layers: Sequence[nn.Module]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


class LongSkips(Model):
    """Each layer reads the output of the one before the last as well."""

    def forward(self, x: Tensor) -> Tensor:
        before = x
        for layer in self.layers:
            before, x = x, layer(x + before.sin())
        return x


class Collecting(Model):
    """The loss reads what each layer gives."""

    def forward(self, x: Tensor) -> Tensor:
        seen = []
        for layer in self.layers:
            x = layer(x)
            seen.append(x)
        return torch.stack(seen)


class Numbered(Model):
    """Each layer is used by its number."""

    def forward(self, x: Tensor) -> Tensor:
        for i, layer in enumerate(self.layers):
            x = layer(x) / (i + 1)
        return x


class Checkpointed(Model):
    """Each layer is in a checkpoint; or `together` so many, or none where it is not `wanted`."""

    def __init__(
        self,
        layers: Sequence[nn.Module],
        *,
        together: int = 1,
        wanted: Callable[[int], bool] = lambda i: True,
        **how: Any,
    ) -> None:
        super().__init__(layers)
        self.together, self.wanted = together, wanted
        self.how = {"use_reentrant": False, **how}

    def forward(self, x: Tensor) -> Tensor:
        for i in range(0, len(self.layers), self.together):
            part = self.layers[i : i + self.together]

            def run(x: Tensor, part: Any = part) -> Tensor:
                for layer in part:
                    x = layer(x)
                return x

            x = checkpoint(run, x, **self.how) if self.wanted(i) else run(x)
        return x


class Inside(Layer):
    """A part of the layer is in a checkpoint, and in that a part is in one more."""

    def forward(self, x: Tensor) -> Tensor:
        def outer(x: Tensor) -> Tensor:
            y: Tensor = checkpoint(self.linear, x, use_reentrant=False)
            return torch.tanh(y)

        y: Tensor = checkpoint(outer, x, use_reentrant=False)
        return x + y


def keeping_products() -> Any:
    """What a selective checkpoint keeps: results of matrix products."""
    return create_selective_checkpoint_contexts([torch.ops.aten.addmm.default])


class Twice(Model):
    """The middle layer is called once more."""

    def forward(self, x: Tensor) -> Tensor:
        again: Tensor = self.layers[LAYERS // 2](super().forward(x))
        return again


class Counting(Layer):
    """Its buffer counts the calls."""

    calls: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return super().forward(x)


class InDouble(Layer):
    """Computes in float64."""

    def __init__(self) -> None:
        super().__init__()
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.double()).float()


def plain(count: int = LAYERS) -> list[nn.Module]:
    """Layers that are alike."""
    return [Layer() for _ in range(count)]


def dropping(count: int = LAYERS) -> list[nn.Module]:
    """Layers that are alike, and draw numbers."""
    return [Layer(drop=0.1) for _ in range(count)]


def with_one(layer: Callable[[], nn.Module]) -> nn.Module:
    """Alike but for the one in the middle."""
    layers = plain()
    layers[LAYERS // 2] = layer()
    return Model(layers)


def changed(change: Callable[[Any], object]) -> nn.Module:
    """Alike, with a change to that in the middle."""
    model = Model(plain())
    change(model.layers[LAYERS // 2])
    return model


def tied() -> nn.Module:
    """Two layers have one parameter."""
    model = Model(plain())
    layers: Any = model.layers
    layers[LAYERS // 2].linear.weight = layers[1].linear.weight
    return model


def in_one_memory() -> nn.Module:
    """All parameters are parts of one tensor."""
    model = Model(plain())
    parameters = list(model.parameters())
    whole = torch.empty(sum(p.numel() for p in parameters))
    for p, part in zip(parameters, whole.split([p.numel() for p in parameters]), strict=True):
        p.data = part.view(p.shape)
    return model


def hooked(layer: nn.Module) -> None:
    layer.register_forward_hook(lambda module, args, output: output * 2)


def frozen(layer: nn.Module) -> None:
    layer.requires_grad_(False)


def job(
    make: Callable[[], nn.Module],
    optimizer: Callable[[nn.Module], torch.optim.Optimizer] | None = None,
    *,
    clips: bool = False,
    keeps: bool = False,
) -> Build:
    """A step of a model; `keeps` its gradients for the next."""

    def build() -> tuple[Callable[..., Any], tuple[Any, ...]]:
        model = make()
        updates = (optimizer or sgd)(model)

        def step(x: Tensor) -> Tensor:
            if not keeps:
                updates.zero_grad()
            loss: Tensor = model(x).square().mean()
            loss.backward()
            if clips:
                nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            updates.step()
            return loss

        return step, (torch.ones(2, WIDTH),)

    return build


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1)


def a_rate_a_layer(model: Any) -> torch.optim.Optimizer:
    groups = [{"params": [*m.parameters()], "lr": 0.1 * i} for i, m in enumerate(model.layers)]
    return torch.optim.SGD(groups)


MIDDLE = LAYERS // 2
ALIKE: dict[str, tuple[Build, list[range]]] = {
    "sgd": (job(lambda: Model(plain())), [range(3, LAYERS - 2)]),
    "adamw": (
        job(lambda: Model(plain()), lambda m: torch.optim.AdamW(m.parameters()), clips=True),
        [range(3, LAYERS - 2)],
    ),
    "foreach": (
        job(
            lambda: Model(plain()),
            lambda m: torch.optim.Adam(m.parameters(), foreach=True),
            clips=True,
        ),
        [range(3, LAYERS - 2)],
    ),
    "dropout": (
        job(lambda: Model(dropping())),
        [range(3, LAYERS - 2)],
    ),
    "buffers": (job(lambda: Model([Counting() for _ in range(LAYERS)])), [range(3, LAYERS - 2)]),
    "checkpoints": (job(lambda: Checkpointed(dropping())), [range(3, LAYERS - 2)]),
    "reentrant checkpoints": (
        job(lambda: Checkpointed(dropping(), use_reentrant=True)),
        [range(3, LAYERS - 2)],
    ),
    "selective checkpoints": (
        job(lambda: Checkpointed(plain(), context_fn=keeping_products)),
        [range(3, LAYERS - 2)],
    ),
    "checkpoints in a layer": (
        job(lambda: Model([Inside() for _ in range(LAYERS)])),
        [range(3, LAYERS - 2)],
    ),
    "two layers a checkpoint": (
        job(lambda: Checkpointed(plain(16), together=2)),
        [range(3, 6)],
    ),
    "every second in a checkpoint": (
        job(lambda: Checkpointed(plain(16), wanted=lambda i: i % 2 == 0)),
        [range(3, 6)],
    ),
}
DIFFERENT: dict[str, Build] = {
    "width": job(lambda: with_one(lambda: Layer(8))),
    "constant": job(lambda: with_one(lambda: Layer(scale=2.0))),
    "dropout rate": job(lambda: with_one(lambda: Layer(drop=0.5))),
    "training flag": job(
        lambda: Model([Layer(drop=0.5).train(i != LAYERS // 2) for i in range(LAYERS)])
    ),
    "frozen": job(lambda: changed(frozen)),
    "hook": job(lambda: changed(hooked)),
    "written buffer": job(lambda: with_one(Counting)),
    "activation": job(lambda: changed(lambda layer: setattr(layer, "dropout", nn.ReLU()))),
    "shared parameter": job(tied),
    "shared memory": job(in_one_memory),
    "number of the layer": job(lambda: Numbered(plain())),
    "long skips": job(lambda: LongSkips(plain())),
    "outputs of all": job(lambda: Collecting(plain())),
    "called twice": job(lambda: Twice(plain())),
    "rates": job(lambda: Model(plain()), a_rate_a_layer),
    "kept gradients": job(lambda: Model(plain()), keeps=True),
    "number of layers in a checkpoint": job(
        lambda: Checkpointed(plain(), wanted=lambda i: i != LAYERS // 2)
    ),
    "in a checkpoint": job(
        lambda: Checkpointed(
            [Layer(scale=1.0 + (i == LAYERS // 2)) for i in range(LAYERS)],
        )
    ),
    "one checkpoint": job(lambda: Checkpointed(plain(), together=LAYERS)),
    "two types of gradients": job(
        lambda: with_one(InDouble),
        lambda m: torch.optim.Adam(m.parameters(), foreach=True),
        clips=True,
    ),
    "dtype": job(lambda: with_one(InDouble)),
}

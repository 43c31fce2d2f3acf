"""The parts of a random program: its model, batches, optimizers, and the step that joins them.

In: a `Spec`. Out: what `fuzz_run` trains with.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import Optimizer

from tests.support.fuzz.fuzz_edits import Edits
from tests.support.fuzz.fuzz_layers import Net
from tests.support.fuzz.fuzz_specs import OptimizerSpec, Spec
from tests.support.steps import Step


def make_model(spec: Spec, dtype: torch.dtype) -> nn.Module:
    model = spec.model
    flags = {"reads_tokens": model.reads_tokens, "tied": model.tied}
    net = Net(model.layers, model.width, model.classes, **flags)
    for param in net.parameters():
        if param.dtype is torch.float32:
            param.data = param.data.to(dtype)
    for module in net.modules():
        for name, buffer in module.named_buffers(recurse=False):
            if buffer.dtype is torch.float32:
                setattr(module, name, buffer.to(dtype))
    return net.train()


def make_batches(spec: Spec, dtype: torch.dtype) -> list[tuple[Tensor, Tensor]]:
    def batch(rows: int) -> tuple[Tensor, Tensor]:
        y = torch.randint(0, spec.model.classes, (rows,))
        if spec.model.reads_tokens:
            return torch.randint(0, spec.model.classes, (rows,)), y
        return torch.randn(rows, 6, dtype=dtype), y

    return [batch(rows) for rows in spec.loop.rows]


def trained_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    return {name: p for name, p in model.named_parameters() if p.requires_grad}


def make_edits(spec: Spec, model: nn.Module) -> Edits:
    loop = spec.loop
    return Edits(trained_parameters(model), loop.before, loop.behind, loop.by_hand)


def make_masters(spec: Spec, model: nn.Module) -> dict[str, tuple[nn.Parameter, Tensor]]:
    """Parameters with the wider copies that the optimizer trains; none where it trains them."""
    if not spec.loop.masters or spec.loop.by_hand:
        return {}
    wide = {torch.bfloat16: torch.float32}
    return {
        name: (p, p.detach().to(wide.get(p.dtype, torch.float64), copy=True).requires_grad_())
        for name, p in trained_parameters(model).items()
    }


def make_optimizers(
    spec: Spec,
    model: nn.Module,
    masters: Mapping[str, tuple[nn.Parameter, Tensor]],
    *,
    is_eager: bool,
) -> list[Optimizer]:
    """One, or two that share the parameters, or none where the update is written by hand."""
    trained: list[Tensor] = [q for _, q in masters.values()]
    trained = trained or [*trained_parameters(model).values()]
    if spec.loop.by_hand:
        return []
    if not spec.loop.second or len(trained) < 2:
        return [make_optimizer(spec.optimizer, trained, is_eager=is_eager)]
    first = make_optimizer(spec.optimizer, trained[::2], is_eager=is_eager)
    return [first, torch.optim.SGD(trained[1::2], lr=0.01, momentum=0.9)]


def make_optimizer(spec: OptimizerSpec, trained: Sequence[Tensor], *, is_eager: bool) -> Optimizer:
    count = len(spec.groups)
    groups = [{**extra, "params": trained[i::count]} for i, extra in enumerate(spec.groups)]
    settings = dict(spec.settings) if is_eager else {**spec.settings, **spec.flags}
    make: Any = getattr(torch.optim, spec.name)
    made: Optimizer = make([g for g in groups if g["params"]], lr=5e-3, **settings)
    return made


def make_step(
    spec: Spec,
    model: nn.Module,
    optimizers: Sequence[Optimizer],
    edits: Edits,
    masters: Mapping[str, tuple[nn.Parameter, Tensor]],
) -> Step:
    loop = spec.loop
    clears = [model] if masters or loop.by_hand else optimizers
    pairs = [*masters.values()]

    def loss_of(x: Tensor, y: Tensor) -> Tensor:
        if not loop.autocast:
            return F.cross_entropy(model(x), y)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return F.cross_entropy(model(x), y)

    def step(x: Tensor, y: Tensor) -> Any:
        if loop.clear != "last":
            for owner in clears:
                owner.zero_grad(set_to_none=loop.clear == "first")
        parts = zip(x.chunk(loop.micro_batches), y.chunk(loop.micro_batches), strict=True)
        for part_x, part_y in parts:
            loss = loss_of(part_x, part_y) / loop.micro_batches
            loss.backward()
        norm = clip(loop.clip, model)
        edits.edit_gradients()
        if loop.by_hand:
            edits.update()
        for param, master in pairs:
            if param.grad is not None:
                master.grad = param.grad.to(master.dtype)
        for optimizer in optimizers:
            optimizer.step()
        with torch.no_grad():
            for param, master in pairs:
                param.copy_(master)
        edits.edit_parameters()
        if loop.clear == "last":
            for owner in clears:
                owner.zero_grad()
        return RETURNS[loop.returns](loss, norm)

    return step


def clip(how: str, model: nn.Module) -> Tensor | None:
    if how == "value":
        nn.utils.clip_grad_value_(model.parameters(), 0.05)
        return None
    if how == "none":
        return None
    norm_type = math.inf if how == "infinity norm" else 2.0
    return nn.utils.clip_grad_norm_(model.parameters(), 0.5, norm_type=norm_type)


RETURNS: dict[str, Callable[[Tensor, Tensor | None], Any]] = {
    "loss": lambda loss, norm: loss,
    "item": lambda loss, norm: loss.item(),
    "dictionary": lambda loss, norm: {"loss": loss.detach(), "norm": norm},
    "tuple": lambda loss, norm: (loss, norm, loss * 2),
    "nothing": lambda loss, norm: None,
}

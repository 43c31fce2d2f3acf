"""Step text: a training as the plain PyTorch step that this backend compiles."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from cotrain_compile.migrate.counterparts import Optimizer, Precision, Training

_DEFAULT = Optimizer("torch.optim.AdamW")
_SHARDED = (
    "for layer in model.layers:  # the modules that repeat, whatever their name is",
    "    fully_shard(layer)",
    "fully_shard(model)",
)
_DTYPES = {Precision.AUTOCAST_BF16: "torch.bfloat16", Precision.AUTOCAST_FP16: "torch.float16"}


def options_of(training: Training) -> dict[str, Any]:
    """The options for `training`.

    A step that rested off the card may be larger than it, so the model stays on the host until the
    plan places it; on several ranks each of them is on its card already. The budget is what the
    card leaves to a step.
    """
    options = {"device": "cuda"} if training.offloads and not training.shards else {}
    return options | ({"disk": training.disk} if training.disk else {})


def step_text(training: Training) -> str:
    """Python for `training`: `model`, `loss_of(model, batch)` and the batches are the user's."""
    return "\n".join(_lines(training)) + "\n"


def _lines(training: Training) -> Iterator[str]:
    optimizer = training.optimizer or _DEFAULT
    scaled = training.precision is Precision.AUTOCAST_FP16
    module = optimizer.name.rpartition(".")[0]
    yield "import torch"
    if training.shards:
        yield "from torch.distributed.fsdp import fully_shard"
    if module and not module.startswith("torch."):
        yield f"import {module}"
    yield ""
    if training.precision is Precision.WEIGHTS_BF16:
        yield "model.to(torch.bfloat16)"
    if training.shards:
        yield from _SHARDED
    unknown = "" if module else "  # none of torch: import it, or take another"
    yield f"optimizer = {optimizer.name}({', '.join(_arguments(optimizer))}){unknown}"
    if scaled:
        yield "scaler = torch.amp.GradScaler()"
    yield from ("", "")
    yield from _step(training, scaled=scaled)
    yield from ("", "")
    options = options_of(training)
    told = f", options={options!r}" if options else ""
    yield f'step = torch.compile(step, backend="cotrain"{told})'.replace("'", '"')


def _arguments(optimizer: Optimizer) -> Iterator[str]:
    yield "model.parameters()"
    for name, value in optimizer.arguments.items():
        yield f"{name}={tuple(value) if isinstance(value, list) else value!r}"


def _step(training: Training, *, scaled: bool) -> Iterator[str]:
    parts = training.micro_batches
    several = parts > 1
    yield "def step(batches):" if several else "def step(batch):"
    yield "    optimizer.zero_grad()"
    if several:
        yield f"    for batch in batches:  # {parts} micro-batches"
    yield from (f"{'    ' * (2 if several else 1)}{line}" for line in _backward(training, scaled))
    if scaled and training.clip is not None:
        yield "    scaler.unscale_(optimizer)"
    if training.clip is not None:
        yield f"    torch.nn.utils.clip_grad_norm_(model.parameters(), {training.clip!r})"
    yield "    scaler.step(optimizer)" if scaled else "    optimizer.step()"
    if scaled:
        yield "    scaler.update()"
    yield "    return loss"


def _backward(training: Training, scaled: bool) -> Iterator[str]:
    dtype = _DTYPES.get(training.precision)
    if dtype is None:
        yield "loss = loss_of(model, batch)"
    else:
        yield f'with torch.autocast("cuda", dtype={dtype}):'
        yield "    loss = loss_of(model, batch)"
    part = f"(loss / {training.micro_batches})" if training.micro_batches > 1 else "loss"
    yield f"scaler.scale({part}).backward()" if scaled else f"{part}.backward()"

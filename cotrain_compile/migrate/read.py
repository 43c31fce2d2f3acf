"""Read: a file of another framework, and what it is in terms of this one.

Step text: a training as the plain PyTorch step that this backend compiles.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from cotrain_compile.errors import FormatError
from cotrain_compile.migrate import accelerate, axolotl, deepspeed, torchtune
from cotrain_compile.migrate.counterparts import (
    Counterpart,
    Optimizer,
    Precision,
    Ranks,
    Rule,
    Training,
    counterparts,
)


@dataclass(frozen=True)
class Framework:
    """Whose file it is: `marks` are settings of which every file of this kind has one."""

    name: str
    marks: tuple[str, ...]
    rules: tuple[Rule, ...]
    training: Callable[[Mapping[str, Any]], Training]


FRAMEWORKS: tuple[Framework, ...] = (
    Framework(
        "Accelerate",
        ("compute_environment", "distributed_type", "fsdp_config.fsdp_version"),
        accelerate.RULES,
        accelerate.training,
    ),
    Framework("axolotl", ("base_model", "adapter"), axolotl.RULES, axolotl.training),
    Framework(
        "torchtune",
        ("model._component_", "optimizer._component_", "tokenizer._component_"),
        torchtune.RULES,
        torchtune.training,
    ),
    Framework(
        "DeepSpeed",
        (
            "zero_optimization",
            "train_batch_size",
            "train_micro_batch_size_per_gpu",
            "gradient_accumulation_steps",
            "bf16.enabled",
            "fp16.enabled",
            "optimizer.type",
        ),
        deepspeed.RULES,
        deepspeed.training,
    ),
)


@dataclass(frozen=True)
class Configuration:
    """A file: whose it is, what it says of the step, and what stands for each of its settings."""

    framework: str
    training: Training
    counterparts: tuple[Counterpart, ...]


def read(file: Path) -> Configuration:
    """What `file`, a JSON or YAML of a framework that is known here, says.

    Raises `FormatError` where it is neither, or of no framework that is known; OSError where it
    cannot be read.
    """
    document = _document(file)
    for framework in FRAMEWORKS:
        if any(_has(document, mark) for mark in framework.marks):
            found = counterparts(document, framework.rules)
            return Configuration(framework.name, framework.training(document), found)
    names = ", ".join(framework.name for framework in FRAMEWORKS)
    raise FormatError(
        f"{file} has no setting by which a configuration of {names} is known; its first ones are "
        f"{', '.join(map(str, list(document)[:4])) or 'none'}"
    )


def _document(file: Path) -> Mapping[str, Any]:
    text = file.read_text(encoding="utf-8", errors="replace")
    try:
        # JSON is not quite a part of YAML: tabs between its words are none there.
        document = json.loads(text) if file.suffix == ".json" else yaml.safe_load(text)
    except (json.JSONDecodeError, yaml.YAMLError) as error:
        told = " ".join(str(error).split())
        raise FormatError(f"{file} is no {file.suffix.lstrip('.') or 'YAML'}: {told}") from None
    if not isinstance(document, Mapping):
        raise FormatError(f"{file} has no settings by name, but {type(document).__name__}")
    return {str(key): value for key, value in document.items()}


def _has(document: Mapping[str, Any], path: str) -> bool:
    found: Any = document
    for part in path.split("."):
        if not isinstance(found, Mapping) or part not in found:
            return False
        found = found[part]
    return True


_DEFAULT = Optimizer("torch.optim.AdamW")
# What each kind of ranks imports, and does with the model.
_SHARED: Mapping[Ranks, tuple[str, tuple[str, ...]]] = {
    Ranks.REPLICAS: (
        "from torch.nn.parallel import DistributedDataParallel",
        ("model = DistributedDataParallel(model)",),
    ),
    Ranks.SHARDS: (
        "from torch.distributed.fsdp import fully_shard",
        (
            "for layer in model.layers:  # the modules that repeat, whatever their name is",
            "    fully_shard(layer)",
            "fully_shard(model)",
        ),
    ),
}
_DTYPES = {Precision.AUTOCAST_BF16: "torch.bfloat16", Precision.AUTOCAST_FP16: "torch.float16"}


def options_of(training: Training) -> dict[str, Any]:
    """The options for `training`.

    A step that rested off the card may be larger than it, so the model stays on the host until the
    plan places it; on several ranks each of them is on its card already. The budget is what the
    card leaves to a step.
    """
    alone = training.ranks is Ranks.ONE
    options = {"device": "cuda"} if training.offloads and alone else {}
    return options | ({"disk": training.disk} if training.disk else {})


def step_text(training: Training) -> str:
    """Python for `training`: `model`, `loss_of(model, batch)` and the batches are the user's."""
    return "\n".join(_lines(training)) + "\n"


def _lines(training: Training) -> Iterator[str]:
    optimizer = training.optimizer or _DEFAULT
    scaled = training.precision is Precision.AUTOCAST_FP16
    module = optimizer.name.rpartition(".")[0]
    imported, shared = _SHARED.get(training.ranks, ("", ()))
    yield "import torch"
    if imported:
        yield imported
    if module and not module.startswith("torch."):
        yield f"import {module}"
    yield ""
    if training.precision is Precision.WEIGHTS_BF16:
        yield "model.to(torch.bfloat16)"
    yield from shared
    yield f"optimizer = {optimizer.name}({', '.join(_arguments(optimizer))}){_remark(optimizer)}"
    if scaled:
        yield "scaler = torch.amp.GradScaler()"
    yield from ("", "")
    yield from _step(training, scaled=scaled)
    yield from ("", "")
    options = options_of(training)
    told = f", options={options!r}" if options else ""
    yield f'step = torch.compile(step, backend="cotrain"{told})'.replace("'", '"')


def _remark(optimizer: Optimizer) -> str:
    """What is to be done before the optimizer can be made."""
    if optimizer.name == "torch.optim.Muon":
        return "  # of matrices alone: give the other parameters to AdamW"
    return "" if "." in optimizer.name else "  # none of torch: import it, or take another"


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

"""Read: a file of another framework, and what it is in terms of this one."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from cotrain_compile.errors import FormatError
from cotrain_compile.migrate import accelerate, axolotl, deepspeed, torchtune
from cotrain_compile.migrate.counterparts import Counterpart, Rule, Training, counterparts


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

"""Which step a published row is of, traced: `features_of(row)`.

Models of equal layers are traced with few of them, and grow by what one more adds. Some are traced
at another batch; all but the update then grows with the batch.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from bench.published.models import Build, bert_step, decoder_step, llama_step, timm_step
from cotrain_compile import presets
from cotrain_compile.dataflow import Dataflow
from cotrain_compile.entry.tracing import trace
from cotrain_compile.files import load, save
from cotrain_compile.machine import Machine

Row = Mapping[str, Any]
FOLDER = Path("build/published")

# Width, heads and layers of MPT (llm-foundry's README).
_MPT = {
    "125m": (768, 12, 12),
    "350m": (1024, 16, 24),
    "760m": (1536, 12, 24),
    "1b": (2048, 16, 24),
    "3b": (2560, 20, 32),
    "7b": (4096, 32, 32),
}


@dataclass(frozen=True)
class Traced:
    """How a row's step is traced: `make(layers)` for each of `traced` layers, of `layers` in all.

    `batch` is that of the trace, `update_share` the part of the update that this card does. Only
    with `fused_attention` does the trace depend on the card, whose kernel it then has. With
    `dissolve` its checkpoints are left to the rule.
    """

    name: str
    make: Callable[[int], Build]
    batch: int
    layers: int = 0
    traced: tuple[int, ...] = (0,)
    update_share: float = 1.0
    fused_attention: bool = False
    dissolve: bool = False

    def steps(self, machine: Machine, folder: Path = FOLDER) -> tuple[Dataflow, ...]:
        """Each from `folder` where it is there, else traced as for `machine` and kept there."""
        found = []
        card = machine if self.fused_attention else presets.find("a100-80")
        chip = "".join(map(str, card.compute_capability or ()))
        for layers in self.traced:
            path = folder / f"{self.name}_L{layers}_sm{chip}.json"
            if not path.exists():
                folder.mkdir(parents=True, exist_ok=True)
                checkpoints = "dissolve" if self.dissolve else "respect"
                save(trace(self.make(layers), machine=card, checkpoints=checkpoints), path)
            found.append(load(path, Dataflow))
        return tuple(found)

    def grown(self, few: float, more: float) -> float:
        """A feature of all layers by that of the two traced numbers of them."""
        low, high = self.traced
        return few + (more - few) * (self.layers - low) / (high - low)


def traced_of(row: Row) -> Traced | None:
    """How to trace the step of `row`; None where nothing here is that step."""
    name, batch = str(row["id"]), row["batch"]
    if batch is None or row["kind"] == "memory":
        return None
    for begins, maker in _MAKERS.items():
        if re.match(begins, name):
            return maker(row, batch)
    return None


def _timm(row: Row, batch: int) -> Traced:
    name, last = row["model"], "channels_last" in row["precision"]
    same = f"{name}{'_last' if last else ''}_{batch}"
    return Traced(same, lambda _: timm_step(name, batch, last=last), batch)


def _mpt(row: Row, batch: int) -> Traced:
    size, length = row["model"][4:], row["sequence_or_size"]
    width, heads, layers = _MPT[size]
    pure = "pure" in row["precision"]
    dtype = torch.bfloat16 if pure else torch.float32
    name = f"mpt_{size}_{batch}x{length}{'_pure' if pure else ''}"

    def make(few: int) -> Build:
        return decoder_step(width, heads, few, batch, length, mpt=True, dtype=dtype)

    return Traced(name, make, batch, layers, (1, 2), 1 / 8, fused_attention=True)


def _gpt2(row: Row, batch: int) -> Traced:
    by_hand = "manual" in row["note"]

    def make(few: int) -> Build:
        return decoder_step(768, 12, few, batch, 1024, by_hand=by_hand)

    return Traced(
        f"gpt2_{batch}{'_by_hand' if by_hand else ''}",
        make,
        batch,
        12,
        (1, 2),
        fused_attention=not by_hand,
    )


def _bert(row: Row, batch: int) -> Traced:
    size, length = ("large" if "large" in row["id"] else "base"), row["sequence_or_size"]
    is_tf32 = row["precision"] == "tf32"
    dtype, at = (torch.float32, batch) if is_tf32 else (torch.float16, 64)
    del batch
    layers = {"base": 12, "large": 24}[size]

    def make(few: int) -> Build:
        if is_tf32:
            return _with_tf32(bert_step(size, few, at, length, dtype))
        return bert_step(size, few, at, length, dtype)

    name = f"bert_{size}_{length}_{'tf32' if is_tf32 else 'half'}"
    return Traced(name, make, at, layers, (1, 2))


def _with_tf32(build: Build) -> Build:
    def build_again() -> Any:
        torch.set_float32_matmul_precision("high")
        return build()

    return build_again


def _resnet50(row: Row, batch: int) -> Traced:
    del row, batch
    return Traced("resnet50_512", lambda _: timm_step("resnet50", 512), 512)


def _resnext101(row: Row, batch: int) -> Traced:
    mixed = None if row["precision"] == "tf32" else torch.float16
    name = f"resnext101_{batch}{'_tf32' if mixed is None else ''}"
    model = "resnext101_32x4d"
    return Traced(name, lambda _: timm_step(model, batch, autocast=mixed), batch)


def _llama(shape: str, layers: int, **told: Any) -> Callable[[Row, int], Traced]:
    def of_row(row: Row, batch: int) -> Traced:
        length = row["sequence_or_size"]
        ways = {"checkpointed": bool(row["checkpointing"]), **told}
        words = "".join(f"_{key}" for key, value in ways.items() if value)
        name = f"llama_{shape}_{batch}x{length}{words}"

        def make(few: int) -> Build:
            return llama_step(shape, few, batch, length, **ways)

        return Traced(name, make, batch, layers, (1, 2), fused_attention=True)

    return of_row


# Blocks of timm's vision transformers.
_VITS = {"ao-vith": ("vit_huge_patch14_224", 32), "ao-vitg": ("vit_giant_patch14_224", 40)}


def _vit(row: Row, batch: int) -> Traced:
    name, layers = _VITS[row["id"][:7]]
    checkpointed = bool(row["checkpointing"])

    def make(few: int) -> Build:
        return timm_step(
            name,
            batch,
            autocast=None,
            dtype=torch.bfloat16,
            fused_attention=True,
            checkpointed=checkpointed,
            adamw=True,
            depth=few,
        )

    traced = f"{name}_{batch}{'_checkpointed' * checkpointed}"
    return Traced(traced, make, batch, layers, (1, 2), fused_attention=True)


def _vit_base(row: Row, batch: int) -> Traced:
    name = row["model"]

    def make(few: int) -> Build:
        return timm_step(name, batch, fused_attention=True, adamw=True, depth=few)

    return Traced(f"{name}_{batch}_amp", make, batch, 12, (1, 2), fused_attention=True)


_MAKERS: Mapping[str, Callable[[Row, int], Traced]] = {
    "timm-|own-resnet50": _timm,
    "mpt-": _mpt,
    "nano|llmc|own-gpt2": _gpt2,
    "bert-|ngc-bert": _bert,
    "resnet50-": _resnet50,
    "ngc-resnext101": _resnext101,
    "thunder-tiny|litgpt-tiny|own-llama": _llama("tiny", 22),
    "tune-3b": _llama("3b", 28),
    "tune-8b-lora": _llama("8b", 32, lora=8),
    "tune-8b-full": _llama("8b", 32),
    "own-vit": _vit_base,
    "ao-vit": _vit,
}

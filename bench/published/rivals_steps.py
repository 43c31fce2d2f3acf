"""Which steps published rows of systems that offload are of: `STEPS[name]`, as they are traced."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from bench.published.models import Build, decoder_step, llama_step, timm_step
from bench.published.steps import Traced


def _vit_g(name: str, *, dissolve: bool = False, **told: Any) -> Traced:
    """ViT-g/14 of 1.1 B parameters, batch 32, checkpointed, as torchao's README trains it."""

    def make(few: int) -> Build:
        return timm_step(
            "vit_giant_patch14_224",
            32,
            fused_attention=True,
            checkpointed=True,
            adamw=True,
            depth=few,
            **told,
        )

    return Traced(name, make, 32, 40, (1, 2), fused_attention=True, dissolve=dissolve)


def _llama(shape: str, layers: int, batch: int, length: int, **told: bool) -> Traced:
    words = "".join(f"_{word}" for word in told)

    def make(few: int) -> Build:
        return llama_step(shape, few, batch, length, **told)

    name = f"llama_{shape}_{batch}x{length}{words}"
    return Traced(name, make, batch, layers, (1, 2), fused_attention=True)


def _gpt2(name: str, layers: int, batch: int) -> Traced:
    """Of width 4096, as ZeRO-Offload's table 3 has them, with 1024 tokens a sequence."""

    def make(few: int) -> Build:
        return decoder_step(
            4096, 32, few, batch, 1024, by_hand=True, checkpointed=True, low=torch.float16
        )

    name = f"gpt2_{name}_{batch}x1024_dissolved"
    return Traced(name, make, batch, layers, (1, 2), dissolve=True)


STEPS: Mapping[str, Callable[[], Traced]] = {
    "vit-g": lambda: _vit_g("vit_g_bfloat16", autocast=None, dtype=torch.bfloat16),
    "vit-g, mixed": lambda: _vit_g("vit_g_mixed", autocast=torch.bfloat16),
    "vit-g, weights cast once": lambda: _vit_g(
        "vit_g_dissolved", dissolve=True, autocast=torch.bfloat16
    ),
    "qwen-3b": lambda: _llama("qwen-3b", 36, 4, 512, mixed=True),
    "qwen-1.5b": lambda: _llama("qwen-1.5b", 28, 4, 512, mixed=True),
    "llama-70b": lambda: _llama("70b", 80, 2, 2048, checkpointed=True),
    "gpt2-10b": lambda: _gpt2("10b", 50, 10),
    "gpt2-13b": lambda: _gpt2("13b", 65, 4),
}

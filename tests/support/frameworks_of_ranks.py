"""Training loops of frameworks on one of several ranks, in eager and compiled."""

from __future__ import annotations

import importlib
import os
import sys
import tempfile
import warnings
from pathlib import Path
from typing import Any
from unittest import mock

import torch.distributed as dist
from accelerate.state import AcceleratorState
from transformers import Trainer

from cotrain_compile.entry.compiled import newest
from cotrain_compile.graph.collectives import is_collective

EXAMPLES = Path(__file__).parents[2] / "docs" / "examples"
PLACED = {"policy": "zero-offload", "quiet": True}


class Eager(Trainer):
    """The Trainer itself, which takes the options of ours and leaves them."""

    def __init__(self, *args: Any, cotrain: Any = None, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)


def train(rank: int, loop: str) -> tuple[list[float], list[float], int]:
    """The losses of `loop` in eager and compiled, and how often a compiled step exchanges."""
    place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": dist.get_world_size()}
    as_torchrun = {"ACCELERATE_USE_CPU": "true", **{name: str(at) for name, at in place.items()}}
    with (
        warnings.catch_warnings(),
        mock.patch.object(sys, "path", [str(EXAMPLES), *sys.path]),
        mock.patch.dict(os.environ, as_torchrun),
    ):
        warnings.simplefilter("ignore")
        text: Any = importlib.import_module("text")
        config = text.LlamaConfig
        small = mock.patch.object(
            text, "LlamaConfig", lambda **has: config(**{**has, "num_hidden_layers": 1})
        )
        module = importlib.import_module(loop)
        with small:
            run = _accelerate if loop == "accelerate_loop" else _trainer
            eager, compiled = run(module, None), run(module, PLACED)
    step = newest()
    assert step is not None
    return eager, compiled, sum(map(is_collective, step.graph.nodes))


def _accelerate(module: Any, options: dict[str, Any] | None) -> list[float]:
    AcceleratorState._reset_state(reset_partial_state=True)
    losses: list[float] = module.train(options)
    return losses


def _trainer(module: Any, options: dict[str, Any] | None) -> list[float]:
    """With two micro-batches a step, whose gradients are clipped."""
    AcceleratorState._reset_state(reset_partial_state=True)
    ours = module.CotrainTrainer
    with (
        tempfile.TemporaryDirectory() as folder,
        mock.patch.object(module, "CotrainTrainer", Eager if options is None else ours),
    ):
        losses: list[float] = module.train(
            folder,
            options or {},
            max_grad_norm=0.5,
            gradient_accumulation_steps=2,
            ddp_backend="gloo",
            disable_tqdm=True,
        )
    return losses

"""Jobs from a configuration: a training step of a language model that nobody wrote down.

Of a Hugging Face configuration, only what builds the model is read; no code that comes with it is
executed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from cotrain_compile.errors import CotrainError, OptionError
from cotrain_compile.jobs import OptimizerName, Precision

MAX_NORM = 1.0

_OPTIMIZERS: Mapping[OptimizerName, Callable[..., torch.optim.Optimizer]] = {
    "adamw": torch.optim.AdamW,
    "adam": torch.optim.Adam,
    "sgd": lambda params, lr: torch.optim.SGD(params, lr=lr, momentum=0.9),
    "adafactor": torch.optim.Adafactor,
}


def config_job(
    config: str, *, optimizer: OptimizerName, batch: int, length: int, precision: Precision
) -> Callable[[], tuple[Callable[[Tensor], Tensor], tuple[Tensor]]]:
    """What builds a step that trains the causal language model of `config`, and its tokens.

    `config` is a config.json, a folder with one, or a name on the Hugging Face Hub. The step is the
    usual one: next-token loss of `batch` sequences of `length` tokens, norm clipped to 1. With
    "bf16-mixed" parameters are float32 and the forward runs under autocast.

    Raises `OptionError` without transformers, and where there is no such configuration, no causal
    language model for it, or none of its numbers.
    """
    built_for = _read(config)
    text = built_for.get_text_config()  # of a model that also reads images, what reads text
    most = getattr(text, "max_position_embeddings", None)
    if most is not None and length > most:
        raise OptionError(f"--length {length}: {config} has positions for {most} tokens")

    def build() -> tuple[Callable[[Tensor], Tensor], tuple[Tensor]]:
        model = _model(config, built_for, torch.bfloat16 if precision == "bf16" else torch.float32)
        tokens = torch.randint(0, text.vocab_size, (batch, length))
        made = _OPTIMIZERS[optimizer](model.parameters(), lr=1e-4)
        return _step(model, made, mixed=precision == "bf16-mixed"), (tokens,)

    return build


def _step(
    model: nn.Module, optimizer: torch.optim.Optimizer, mixed: bool
) -> Callable[[Tensor], Tensor]:
    def step(tokens: Tensor) -> Tensor:
        optimizer.zero_grad()
        with torch.autocast(tokens.device.type, torch.bfloat16, enabled=mixed):
            logits = model(input_ids=tokens).logits
            loss = F.cross_entropy(logits[:, :-1].flatten(0, 1).float(), tokens[:, 1:].flatten())
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)
        optimizer.step()
        return loss

    return step


def _read(config: str) -> Any:
    """The configuration that `config` names."""
    try:
        from transformers import AutoConfig
    except ImportError as absent:
        raise OptionError(
            f"{config!r} is read as a Hugging Face configuration, which takes transformers: "
            "pip install transformers, or name a job of your own, as job.py:build"
        ) from absent
    if Path(config).suffix == ".json" and not Path(config).is_file():
        raise OptionError(f"{config}: there is no such file")
    try:
        return AutoConfig.from_pretrained(config)
    except (OSError, ValueError) as error:
        raise OptionError(
            f"{config!r} is neither a job, as job.py:build, nor a configuration that transformers "
            f"can read, as llama/config.json: {_words(error)}"
        ) from error
    except Exception as error:  # its classes compute with what they read, and raise what comes
        raise OptionError(
            f"{config}: transformers cannot read this configuration: {_words(error)}"
        ) from error


def _model(config: str, built_for: Any, dtype: torch.dtype) -> nn.Module:
    from transformers import AutoModelForCausalLM

    built_for.use_cache = False
    language_models: Any = AutoModelForCausalLM  # its methods have no annotations
    try:
        model: nn.Module = language_models.from_config(built_for, dtype=dtype)
    except CotrainError:
        raise
    except Exception as error:
        if "Unrecognized configuration class" in str(error):
            raise OptionError(
                f"{config}: transformers has no causal language model for the type "
                f"{built_for.model_type!r}; write its step in a job, as job.py:build"
            ) from error
        raise OptionError(
            f"{config}: transformers cannot build a model of these numbers: {_words(error)}"
        ) from error
    return model.train()


def _words(error: Exception) -> str:
    """What an error of transformers says, on one line, with its kind where that is all it says."""
    said = " ".join(str(error).split()) or type(error).__name__
    return said if isinstance(error, OSError | ValueError) else f"{type(error).__name__}: {said}"

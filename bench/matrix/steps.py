"""The axes of the matrix: small Hugging Face models, optimizers, and ways to write a loop.

An idiom in: model, optimizer, loss and how to compile; out: what runs one call of the loop.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import Optimizer

VOCABULARY, LENGTH, BATCH = 64, 8, 4
RATE = 1e-3
MICRO_BATCHES = 2

LossOf = Callable[[nn.Module, Tensor, Tensor], Tensor]
Step = Callable[..., Any]
CompileWith = Callable[..., Step]


# Architectures: name of the config class, name of the model class, how it differs from the others.

_DECODER = {
    "vocab_size": VOCABULARY,
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "max_position_embeddings": 16,
    "use_cache": False,
    "bos_token_id": 0,
    "eos_token_id": 0,
    "pad_token_id": 0,
}
_NO_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
ARCHITECTURES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "llama": ("LlamaConfig", "LlamaForCausalLM", {**_DECODER, "num_key_value_heads": 1}),
    "mistral": ("MistralConfig", "MistralForCausalLM", {**_DECODER, "num_key_value_heads": 1}),
    "qwen2": ("Qwen2Config", "Qwen2ForCausalLM", {**_DECODER, "num_key_value_heads": 1}),
    "gemma": (
        "GemmaConfig",
        "GemmaForCausalLM",
        {**_DECODER, "num_key_value_heads": 1, "head_dim": 8},
    ),
    "gpt_neox": ("GPTNeoXConfig", "GPTNeoXForCausalLM", _DECODER),
    "gpt2": (
        "GPT2Config",
        "GPT2LMHeadModel",
        {
            "vocab_size": VOCABULARY,
            "n_positions": 16,
            "n_embd": 16,
            "n_layer": 1,
            "n_head": 2,
            "bos_token_id": 0,
            "eos_token_id": 0,
            "use_cache": False,
            "resid_pdrop": 0.0,
            "embd_pdrop": 0.0,
            "attn_pdrop": 0.0,
        },
    ),
    "opt": (
        "OPTConfig",
        "OPTForCausalLM",
        {**_DECODER, "ffn_dim": 32, "word_embed_proj_dim": 16, "dropout": 0.0},
    ),
    "bert": ("BertConfig", "BertForMaskedLM", {**_DECODER, **_NO_DROPOUT}),
    "t5": (
        "T5Config",
        "T5ForConditionalGeneration",
        {
            "vocab_size": VOCABULARY,
            "d_model": 16,
            "d_kv": 8,
            "d_ff": 32,
            "num_layers": 1,
            "num_heads": 2,
            "use_cache": False,
            "dropout_rate": 0.0,
            "decoder_start_token_id": 0,
        },
    ),
    "vit": (
        "ViTConfig",
        "ViTForImageClassification",
        {
            "hidden_size": 16,
            "intermediate_size": 32,
            "num_hidden_layers": 1,
            "num_attention_heads": 2,
            "image_size": 8,
            "patch_size": 4,
            **_NO_DROPOUT,
        },
    ),
}


def make_model(architecture: str, dtype: torch.dtype) -> nn.Module:
    """A small model of `dtype`, in training mode; the caller seeds the generator."""
    import transformers

    config, model, settings = ARCHITECTURES[architecture]
    made: nn.Module = getattr(transformers, model)(getattr(transformers, config)(**settings))
    # The bias of an attention's keys has a gradient of rounding only. From zero, Adam would scale
    # that up to whole updates.
    for name, bias in made.named_parameters():
        if name.endswith("bias"):
            nn.init.normal_(bias, std=0.02)
    return made.to(dtype).train()


def make_batch(architecture: str) -> tuple[Tensor, Tensor]:
    """What the model reads, and its targets."""
    if architecture == "vit":
        return torch.randn(BATCH, 3, 8, 8, dtype=torch.float64), torch.randint(0, 2, (BATCH,))
    return tuple(torch.randint(1, VOCABULARY, (2, BATCH, LENGTH)).unbind())  # type: ignore[return-value]


def loss_of(architecture: str) -> LossOf:
    """A cross entropy that the loop computes from the model's logits."""
    if architecture == "vit":
        return lambda model, x, y: F.cross_entropy(model(pixel_values=x).logits, y)
    if architecture == "t5":
        return lambda model, x, y: F.cross_entropy(
            model(input_ids=x, decoder_input_ids=y).logits.flatten(0, 1), x.flatten()
        )
    return lambda model, x, y: F.cross_entropy(model(input_ids=x).logits.flatten(0, 1), y.flatten())


def own_loss_of(architecture: str) -> LossOf:
    """The loss that the Hugging Face model computes itself."""
    key = "pixel_values" if architecture == "vit" else "input_ids"
    return lambda model, x, y: model(**{key: x}, labels=y).loss


OPTIMIZERS: dict[str, Callable[[Any], Optimizer]] = {
    "AdamW": lambda params: torch.optim.AdamW(params, lr=RATE, foreach=False),
    "Adam": lambda params: torch.optim.Adam(params, lr=RATE, amsgrad=True, foreach=False),
    "SGD": lambda params: torch.optim.SGD(params, lr=0.05, momentum=0.9, foreach=False),
    "Adagrad": lambda params: torch.optim.Adagrad(params, lr=0.01, foreach=False),
    "NAdam": lambda params: torch.optim.NAdam(params, lr=RATE, foreach=False),
    "Adafactor": lambda params: torch.optim.Adafactor(params, lr=0.01, foreach=False),
}


# Idioms.


@dataclass(frozen=True)
class Idiom:
    """How a loop is written, the graphs that takes, and the options and rounding it needs."""

    make: Callable[[nn.Module, Optimizer, LossOf, CompileWith], Step]
    graphs: int = 1
    own_loss: bool = False
    dtype: torch.dtype = torch.float64
    half_precision: bool = False


def _plain(
    model: nn.Module, optimizer: Optimizer, loss_of: LossOf, compile_with: CompileWith
) -> Step:
    def step(x: Tensor, y: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss = loss_of(model, x, y)
        loss.backward()
        optimizer.step()
        return loss

    return compile_with(step)


def _clipping(
    model: nn.Module, optimizer: Optimizer, loss_of: LossOf, compile_with: CompileWith
) -> Step:
    def step(x: Tensor, y: Tensor) -> Tensor:
        loss = loss_of(model, x, y)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        return loss

    return compile_with(step)


def _micro_batches(
    model: nn.Module, optimizer: Optimizer, loss_of: LossOf, compile_with: CompileWith
) -> Step:
    def step(x: Tensor, y: Tensor) -> Tensor:
        total = torch.zeros((), dtype=torch.float64)
        for part_x, part_y in zip(x.chunk(MICRO_BATCHES), y.chunk(MICRO_BATCHES), strict=True):
            loss = loss_of(model, part_x, part_y) / MICRO_BATCHES
            loss.backward()
            total = total + loss.detach()
        optimizer.step()
        optimizer.zero_grad()
        return total

    return compile_with(step)


def _across_calls(
    model: nn.Module, optimizer: Optimizer, loss_of: LossOf, compile_with: CompileWith
) -> Step:
    def step(x: Tensor, y: Tensor, is_last: bool) -> Tensor:
        loss = loss_of(model, x, y) / 3
        loss.backward()
        if is_last:
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
        return loss

    compiled = compile_with(step, keep_grads=True)
    calls = iter(range(1 << 30))
    return lambda x, y: compiled(x, y, next(calls) % 3 == 2)


def _autocast(
    model: nn.Module, optimizer: Optimizer, loss_of: LossOf, compile_with: CompileWith
) -> Step:
    def step(x: Tensor, y: Tensor) -> Tensor:
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = loss_of(model, x.float() if x.is_floating_point() else x, y)
        loss.backward()
        optimizer.step()
        return loss

    return compile_with(step)


def _scaler(
    model: nn.Module, optimizer: Optimizer, loss_of: LossOf, compile_with: CompileWith
) -> Step:
    """The scale is so large that the first steps are skipped."""
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**127, backoff_factor=2.0**-100)

    def step(x: Tensor, y: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss = loss_of(model, x.float() if x.is_floating_point() else x, y)
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        return loss

    return compile_with(step)


def _schedule(
    model: nn.Module, optimizer: Optimizer, loss_of: LossOf, compile_with: CompileWith
) -> Step:
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 10)
    compiled = _plain(model, optimizer, loss_of, compile_with)

    def step(x: Tensor, y: Tensor) -> Any:
        loss = compiled(x, y)
        schedule.step()
        return loss

    return step


IDIOMS: dict[str, Idiom] = {
    "plain": Idiom(_plain),
    "own loss": Idiom(_plain, own_loss=True),
    "clipping": Idiom(_clipping),
    "micro-batches": Idiom(_micro_batches),
    "across calls": Idiom(_across_calls, graphs=3),
    "autocast": Idiom(_autocast, dtype=torch.float32, half_precision=True),
    "GradScaler": Idiom(_scaler, dtype=torch.float32),
    "schedule": Idiom(_schedule, graphs=2),
}


def objective_of(cell: tuple[str, str, str]) -> LossOf:
    """The loss that a cell trains on."""
    return (own_loss_of if IDIOMS[cell[2]].own_loss else loss_of)(cell[0])

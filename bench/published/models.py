"""Steps as published measurements describe them: each function returns `build()` for `trace`.

Models are of timm and transformers, or small ones written here from the shapes their authors give:
MPT of llm-foundry (no biases, norms in bfloat16), GPT-2 of nanoGPT.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

Build = Callable[[], tuple[Callable[..., Tensor], tuple[Any, ...]]]

LLAMAS: Mapping[str, Mapping[str, Any]] = {
    "tiny": {
        "hidden_size": 2048,
        "intermediate_size": 5632,
        "num_attention_heads": 32,
        "num_key_value_heads": 4,
        "vocab_size": 32000,
    },
    "3b": {
        "hidden_size": 3072,
        "intermediate_size": 8192,
        "num_attention_heads": 24,
        "num_key_value_heads": 8,
        "vocab_size": 128256,
        "tie_word_embeddings": True,
    },
    "8b": {
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "vocab_size": 128256,
    },
    "70b": {
        "hidden_size": 8192,
        "intermediate_size": 28672,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
        "vocab_size": 128256,
    },
    # Qwen 2.5 and 3, but for biases and norms of queries and keys, which cost next to nothing.
    "qwen-1.5b": {
        "hidden_size": 1536,
        "intermediate_size": 8960,
        "num_attention_heads": 12,
        "num_key_value_heads": 2,
        "vocab_size": 151936,
        "tie_word_embeddings": True,
    },
    "qwen-3b": {
        "hidden_size": 2048,
        "intermediate_size": 11008,
        "num_attention_heads": 16,
        "num_key_value_heads": 2,
        "vocab_size": 151936,
        "tie_word_embeddings": True,
    },
}


def timm_step(
    name: str,
    batch: int,
    *,
    size: int = 224,
    last: bool = False,
    autocast: torch.dtype | None = torch.float16,
    dtype: torch.dtype = torch.float32,
    fused_attention: bool = False,
    checkpointed: bool = False,
    adamw: bool = False,
    depth: int = 0,
) -> Build:
    """A model of timm as its `benchmark.py` trains it: SGD with momentum, cross entropy.

    A vision transformer may have another `depth` than its own.
    """

    def build() -> tuple[Callable[..., Tensor], tuple[Any, ...]]:
        from bench.published.no_torchvision import stand_in

        stand_in()
        timm = import_module("timm")
        import_module("timm.layers").set_fused_attn(fused_attention)
        model = timm.create_model(name, **({"depth": depth} if depth else {})).to(dtype).train()
        if checkpointed:
            model.set_grad_checkpointing(True)
        if last:
            model = model.to(memory_format=torch.channels_last)
        optimizer: torch.optim.Optimizer = (
            torch.optim.AdamW(model.parameters(), fused=True)
            if adamw
            else torch.optim.SGD(model.parameters(), lr=1e-4, momentum=0.9)
        )

        def step(x: Tensor, y: Tensor) -> Tensor:
            optimizer.zero_grad()
            with torch.autocast(x.device.type, autocast, enabled=autocast is not None):
                loss = F.cross_entropy(model(x), y)
            loss.backward()
            optimizer.step()
            return loss

        x = torch.randn(batch, 3, size, size, dtype=dtype)
        x = x.contiguous(memory_format=torch.channels_last) if last else x
        return step, (x, torch.randint(0, 1000, (batch,)))

    return build


class _NarrowNorm(nn.Module):
    """A layer norm in the lower precision, as MPT's."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        low = torch.bfloat16
        with torch.autocast(x.device.type, enabled=False):
            return F.layer_norm(x.to(low), self.weight.shape, self.weight.to(low))


class _Block(nn.Module):
    """A block of a decoder. By hand: attention as products and a soft maximum."""

    def __init__(self, width: int, heads: int, *, mpt: bool, by_hand: bool, length: int) -> None:
        super().__init__()
        norm: Any = _NarrowNorm if mpt else nn.LayerNorm
        self.heads, self.by_hand, self.tanh = heads, by_hand, not mpt
        self.norms = nn.ModuleList([norm(width), norm(width)])
        self.qkv, self.out = (nn.Linear(width, n * width, bias=not mpt) for n in (3, 1))
        self.up = nn.Linear(width, 4 * width, bias=not mpt)
        self.down = nn.Linear(4 * width, width, bias=not mpt)
        if by_hand:
            mask = torch.tril(torch.ones(length, length)).view(1, 1, length, length)
            self.register_buffer("mask", mask)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        parts = self.qkv(self.norms[0](x)).chunk(3, -1)
        q, k, v = (p.view(batch, length, self.heads, -1).transpose(1, 2) for p in parts)
        if self.by_hand:
            scores = (q @ k.transpose(-2, -1)) * (width // self.heads) ** -0.5
            scores = scores.masked_fill(self.mask == 0, float("-inf"))
            mixed = F.softmax(scores, -1) @ v
        else:
            mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, length, width))
        inner = F.gelu(self.up(self.norms[1](x)), approximate="tanh" if self.tanh else "none")
        found: Tensor = x + self.down(inner)
        return found


class _Decoder(nn.Module):
    def __init__(
        self,
        width: int,
        heads: int,
        layers: int,
        length: int,
        *,
        mpt: bool,
        by_hand: bool,
        checkpointed: bool,
    ) -> None:
        super().__init__()
        self.checkpointed = checkpointed
        vocabulary = 50368 if mpt else 50304
        self.tokens, self.places = nn.Embedding(vocabulary, width), nn.Embedding(length, width)
        self.blocks = nn.ModuleList(
            _Block(width, heads, mpt=mpt, by_hand=by_hand, length=length) for _ in range(layers)
        )
        self.norm = _NarrowNorm(width) if mpt else nn.LayerNorm(width)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tokens(tokens) + self.places(torch.arange(tokens.shape[1], device=tokens.device))
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.checkpointed else block(x)
        return F.linear(self.norm(x), self.tokens.weight)


def decoder_step(
    width: int,
    heads: int,
    layers: int,
    batch: int,
    length: int,
    *,
    mpt: bool = False,
    by_hand: bool = False,
    checkpointed: bool = False,
    dtype: torch.dtype = torch.float32,
    low: torch.dtype = torch.bfloat16,
) -> Build:
    """A decoder of equal layers with AdamW, in autocast to `low` or wholly in `dtype`."""

    def build() -> tuple[Callable[..., Tensor], tuple[Any, ...]]:
        model = _Decoder(
            width, heads, layers, length, mpt=mpt, by_hand=by_hand, checkpointed=checkpointed
        ).to(dtype)
        optimizer = torch.optim.AdamW(model.parameters())
        mixed = dtype is torch.float32

        def step(tokens: Tensor, y: Tensor) -> Tensor:
            optimizer.zero_grad()
            with torch.autocast(tokens.device.type, low, enabled=mixed):
                logits = model(tokens).flatten(0, 1)
                loss = F.cross_entropy(logits if mixed else logits.float(), y.flatten())
            loss.backward()
            optimizer.step()
            return loss

        return step, (_tokens(batch, length), _tokens(batch, length))

    return build


def bert_step(
    size: str, layers: int, batch: int, length: int, dtype: torch.dtype = torch.float16
) -> Build:
    """BERT for answers (SQuAD), its attention by hand, dropout 0.1, wholly in `dtype`."""

    def build() -> tuple[Callable[..., Tensor], tuple[Any, ...]]:
        from transformers import BertConfig, BertForQuestionAnswering

        width, heads = {"base": (768, 12), "large": (1024, 16)}[size]
        by_hand: dict[str, Any] = {"attn_implementation": "eager"}
        config = BertConfig(
            hidden_size=width,
            num_attention_heads=heads,
            intermediate_size=4 * width,
            num_hidden_layers=layers,
            **by_hand,
        )
        model: Any = BertForQuestionAnswering(config)
        model = model.to(dtype).train()
        optimizer = torch.optim.AdamW(model.parameters(), lr=3e-5)

        def step(tokens: Tensor, begins: Tensor, ends: Tensor) -> Tensor:
            optimizer.zero_grad()
            found = model(input_ids=tokens, start_positions=begins, end_positions=ends)
            loss: Tensor = found.loss
            loss.backward()
            optimizer.step()
            return loss

        places = torch.randint(0, 100, (batch,))
        return step, (_tokens(batch, length), places, places.clone())

    return build


class _Adapted(nn.Module):
    """A linear layer with a LoRA adapter."""

    def __init__(self, base: nn.Linear, rank: int) -> None:
        super().__init__()
        kind = base.weight.dtype
        self.base = base
        self.a = nn.Linear(base.in_features, rank, bias=False, dtype=kind)
        self.b = nn.Linear(rank, base.out_features, bias=False, dtype=kind)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.base(x) + 2.0 * self.b(self.a(x))
        return found


def llama_step(
    shape: str,
    layers: int,
    batch: int,
    length: int,
    *,
    lora: int = 0,
    checkpointed: bool = False,
    mixed: bool = False,
) -> Build:
    """A Llama of transformers with AdamW: wholly in bfloat16, as torchtune and LitGPT train it.

    Or `mixed`, with float32 parameters in bfloat16 autocast.
    """

    def build() -> tuple[Callable[..., Tensor], tuple[Any, ...]]:
        from transformers import LlamaConfig, LlamaForCausalLM

        config = LlamaConfig(num_hidden_layers=layers, use_cache=False, **LLAMAS[shape])
        model: Any = LlamaForCausalLM(config)
        model = model.to(torch.float32 if mixed else torch.bfloat16).train()
        if checkpointed:
            model.gradient_checkpointing_enable({"use_reentrant": False})
        if lora:
            model.requires_grad_(False)
            for layer in model.model.layers:
                for name in ("q_proj", "v_proj", "o_proj"):
                    adapted = _Adapted(getattr(layer.self_attn, name), lora)
                    setattr(layer.self_attn, name, adapted)
        optimizer = torch.optim.AdamW(p for p in model.parameters() if p.requires_grad)

        def step(tokens: Tensor, y: Tensor) -> Tensor:
            optimizer.zero_grad()
            with torch.autocast(tokens.device.type, torch.bfloat16, enabled=mixed):
                logits = model(input_ids=tokens).logits
            loss = F.cross_entropy(logits.flatten(0, 1).float(), y.flatten())
            loss.backward()
            optimizer.step()
            return loss

        return step, (_tokens(batch, length), _tokens(batch, length))

    return build


def _tokens(batch: int, length: int) -> Tensor:
    return torch.randint(0, 100, (batch, length))

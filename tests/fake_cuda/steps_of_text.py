"""Steps of models of text and speech: checkpoints, windows, packed batches, adapters, experts."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention.flex_attention import create_block_mask, flex_attention
from torch.nn.attention.varlen import varlen_attn
from torch.utils.checkpoint import checkpoint

from tests.fake_cuda.steps import CARD, Job, fit, named

WIDTH, HEADS, LENGTH, VOCABULARY = 32, 4, 16, 64
SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": WIDTH,
    "intermediate_size": 2 * WIDTH,
    "num_hidden_layers": 2,
    "num_attention_heads": HEADS,
    "num_key_value_heads": HEADS // 2,
    "use_cache": False,
}


def tokens(length: int = LENGTH) -> Tensor:
    return torch.randint(0, VOCABULARY, (2, length), device=CARD)


def own_loss(model: Any, *batch: Tensor) -> Tensor:
    """The loss that a model of Hugging Face's computes, of tokens, labels, and a mask."""
    names = ("input_ids", "labels", "attention_mask")
    return model(**dict(zip(names, batch, strict=False))).loss  # type: ignore[no-any-return]


# Hugging Face's.


def llama(use_reentrant: bool) -> Job:
    from transformers import LlamaConfig, LlamaForCausalLM

    with torch.device(CARD):
        model = LlamaForCausalLM(LlamaConfig(**SIZES))
    model.gradient_checkpointing_enable({"use_reentrant": use_reentrant})  # type: ignore[no-untyped-call]
    return fit(model.train(), own_loss, (tokens(), tokens()))


@named("Llama with reentrant checkpoints")
def llama_reentrant() -> Job:
    return llama(True)


@named("Llama with checkpoints")
def llama_not_reentrant() -> Job:
    return llama(False)


@named("sliding windows")
def mistral() -> Job:
    """A Mistral whose window is shorter than the text, on a padded batch."""
    from transformers import MistralConfig, MistralForCausalLM

    with torch.device(CARD):
        model = MistralForCausalLM(MistralConfig(**SIZES, sliding_window=6))
        mask = torch.ones(2, LENGTH, dtype=torch.long)
    return fit(model.train(), own_loss, (tokens(), tokens(), mask))


@named("sliding windows in float32")
def gemma() -> Job:
    """A Gemma 2: every other layer has a window, scores and logits are capped."""
    from transformers import Gemma2Config, Gemma2ForCausalLM

    config = Gemma2Config(**SIZES, head_dim=8, sliding_window=6)
    with torch.device(CARD):
        model = Gemma2ForCausalLM(config)
    return fit(model.train(), own_loss, (tokens(), tokens()), low=None)


@named("Whisper")
def whisper() -> Job:
    """Sound in, text out: an encoder of convolutions and attention, a decoder that looks at it."""
    from transformers import WhisperConfig, WhisperForConditionalGeneration

    config = WhisperConfig(
        vocab_size=VOCABULARY,
        num_mel_bins=8,
        d_model=WIDTH,
        encoder_layers=1,
        decoder_layers=1,
        encoder_attention_heads=HEADS,
        decoder_attention_heads=HEADS,
        encoder_ffn_dim=WIDTH,
        decoder_ffn_dim=WIDTH,
        max_source_positions=20,
        max_target_positions=LENGTH,
        encoder_layerdrop=0.0,
        dropout=0.1,
        attention_dropout=0.1,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
        decoder_start_token_id=1,
        suppress_tokens=None,
        begin_suppress_tokens=None,
        use_cache=False,
    )
    with torch.device(CARD):
        model = WhisperForConditionalGeneration(config)

    def loss_of(model: Any, sound: Tensor, labels: Tensor) -> Tensor:
        return model(input_features=sound, labels=labels).loss  # type: ignore[no-any-return]

    return fit(model.train(), loss_of, (torch.randn(2, 8, 40, device=CARD), tokens()))


# Several documents in a row.


class Packed(nn.Module):
    """A layer over documents one behind the other; `attend` keeps them apart."""

    def __init__(self, attend: Any) -> None:
        super().__init__()
        self.attend = attend
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.norm = nn.LayerNorm(WIDTH)
        self.inputs, self.output = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, tokens: Tensor, documents: Tensor) -> Tensor:
        x = self.embedding(tokens)
        parts = self.inputs(self.norm(x)).unflatten(-1, (3, HEADS, -1)).unbind(-3)
        x = x + self.output(self.attend(*parts, documents).flatten(-2))
        return F.linear(x, self.embedding.weight)


def next_tokens(model: nn.Module, tokens: Tensor, documents: Tensor) -> Tensor:
    """The loss of what follows within a document; the last token of each says nothing."""
    last = documents != documents.roll(-1, -1)
    targets = tokens.roll(-1, -1).masked_fill(last, -100)
    return F.cross_entropy(model(tokens, documents).flatten(0, -2), targets.flatten())


def packed(attend: Any) -> Job:
    with torch.device(CARD):
        model = Packed(attend)
        documents = torch.arange(LENGTH).expand(2, -1) // 5
    return fit(model, next_tokens, (tokens(), documents))


@named("a packed batch with a mask of blocks")
def packed_by_mask() -> Job:
    def attend(query: Tensor, key: Tensor, value: Tensor, documents: Tensor) -> Tensor:
        same = documents[:, :, None] == documents[:, None, :]
        mask = (same & torch.ones_like(same).tril())[:, None]
        query, key, value = (part.transpose(1, 2) for part in (query, key, value))
        return F.scaled_dot_product_attention(query, key, value, attn_mask=mask).transpose(1, 2)

    return packed(attend)


@named("a packed batch by flex_attention")
def packed_by_flex() -> Job:
    def attend(query: Tensor, key: Tensor, value: Tensor, documents: Tensor) -> Tensor:
        def of_one_document(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
            return (i >= j) & (documents[b, i] == documents[b, j])

        mask = create_block_mask(of_one_document, 2, None, LENGTH, LENGTH, device=CARD)
        query, key, value = (part.transpose(1, 2) for part in (query, key, value))
        mixed: Any = flex_attention(query, key, value, block_mask=mask)
        return mixed.transpose(1, 2)  # type: ignore[no-any-return]

    return packed(attend)


@named("a packed batch by its lengths")
def packed_by_lengths() -> Job:
    """All documents in one row, which `varlen_attn` is told the starts of."""

    def attend(query: Tensor, key: Tensor, value: Tensor, documents: Tensor) -> Tensor:
        begins = torch.searchsorted(documents, torch.arange(5, device=CARD), out_int32=True)
        mixed: Any = varlen_attn(
            query, key, value, begins, begins, LENGTH, LENGTH, window_size=(-1, 0)
        )
        return mixed  # type: ignore[no-any-return]

    with torch.device(CARD):
        model = Packed(attend)
        documents = torch.arange(LENGTH) // 5
    return fit(model, next_tokens, (tokens()[0], documents))


# Adapters over a base that does not train.


class Int8Linear(nn.Module):
    """A weight in 8 bits with a scale for each row, and an adapter of low rank beside it."""

    def __init__(self, inputs: int, outputs: int, rank: int = 16) -> None:
        super().__init__()
        self.register_buffer("weight", torch.zeros(outputs, inputs, dtype=torch.int8))
        self.register_buffer("scale", torch.ones(outputs, 1))
        self.a, self.b = nn.Linear(inputs, rank, False), nn.Linear(rank, outputs, False)
        nn.init.zeros_(self.b.weight)

    def forward(self, x: Tensor) -> Tensor:
        weight = self.weight.to(x.dtype) * self.scale.to(x.dtype)  # type: ignore[operator]
        adapted = self.b(self.a(F.dropout(x, 0.05, self.training)))
        return F.linear(x, weight) + 2.0 * adapted  # type: ignore[no-any-return]


class Adapted(nn.Module):
    """Gated layers in checkpoints, over a frozen embedding that is the head as well."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH).requires_grad_(False)
        self.up = nn.ModuleList(Int8Linear(WIDTH, 2 * WIDTH) for _ in range(2))
        self.down = nn.ModuleList(Int8Linear(WIDTH, WIDTH) for _ in range(2))

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens).requires_grad_()

        def layer(up: nn.Module, down: nn.Module, x: Tensor) -> Tensor:
            value, gate = up(F.rms_norm(x, (WIDTH,))).chunk(2, -1)
            return x + down(value * F.silu(gate))  # type: ignore[no-any-return]

        for up, down in zip(self.up, self.down, strict=True):
            x = checkpoint(layer, up, down, x, use_reentrant=False)
        return F.linear(x, self.embedding.weight)


def following(model: Any, tokens: Tensor) -> Tensor:
    logits = model(tokens)[:, :-1]
    return F.cross_entropy(logits.flatten(0, 1).float(), tokens[:, 1:].flatten())


@named("LoRA over a base of 8 bits")
def lora() -> Job:
    with torch.device(CARD):
        model = Adapted()
    return fit(model, following, (tokens(),))


# Experts.


class Experts(nn.Module):
    """Each token to the best two of four experts, of which each has room for so many tokens."""

    def __init__(self, experts: int = 4, best: int = 2) -> None:
        super().__init__()
        self.best = best
        self.router = nn.Linear(WIDTH, experts, bias=False)
        self.up = nn.Parameter(torch.empty(experts, WIDTH, 2 * WIDTH))
        self.down = nn.Parameter(torch.empty(experts, WIDTH, WIDTH))
        for weight in (self.up, self.down):
            nn.init.kaiming_uniform_(weight, a=math.sqrt(5))
        self.register_buffer("load", torch.zeros(experts))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        flat = x.flatten(0, 1)
        experts = len(self.up)
        room = math.ceil(1.25 * self.best * len(flat) / experts)
        chances = F.softmax(self.router(flat).float(), -1)
        weights, chosen = chances.topk(self.best, -1)
        weights = weights / weights.sum(-1, keepdim=True)
        asked = F.one_hot(chosen.flatten(), experts)
        place = (asked.cumsum(0) * asked).sum(-1) - 1
        slot = chosen.flatten() * room + place.clamp(max=room - 1)
        fits = (place < room).to(flat.dtype)
        token = torch.arange(len(flat), device=x.device).repeat_interleave(self.best)
        given = torch.zeros(experts * room, WIDTH, device=x.device, dtype=flat.dtype)
        given = given.index_add(0, slot, flat[token] * fits[:, None])
        value, gate = torch.bmm(given.view(experts, room, -1), self.up).chunk(2, -1)
        made = torch.bmm(value * F.silu(gate), self.down).flatten(0, 1)[slot]
        share = (weights.flatten() * fits)[:, None].to(made.dtype)
        mixed = torch.zeros_like(flat, dtype=made.dtype).index_add_(0, token, made * share)
        even = experts * (asked.float().mean(0) * chances.mean(0)).sum()
        return mixed.view_as(x), even


class Sparse(nn.Module):
    """Two layers of experts, each in a checkpoint."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleList(Experts() for _ in range(2))

    def forward(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        x = self.embedding(tokens)
        total = x.new_zeros((), dtype=torch.float32)
        for layer in self.layers:
            made, even = checkpoint(layer, F.rms_norm(x, (WIDTH,)), use_reentrant=False)
            x, total = x + made, total + even
        return F.linear(x, self.embedding.weight), total


@named("a mixture of experts with checkpoints")
def experts() -> Job:
    with torch.device(CARD):
        model = Sparse()

    def loss_of(model: Any, tokens: Tensor) -> Tensor:
        logits, even = model(tokens)
        loss = F.cross_entropy(logits[:, :-1].flatten(0, 1).float(), tokens[:, 1:].flatten())
        return loss + 0.01 * even  # type: ignore[no-any-return]

    return fit(model, loss_of, (tokens(),))


@named("Mixtral with checkpoints")
def mixtral() -> Job:
    """Hugging Face's experts, balanced by its own loss, for which its first call sets hooks."""
    from transformers import MixtralConfig, MixtralForCausalLM

    config = MixtralConfig(
        **SIZES,
        num_local_experts=4,
        num_experts_per_tok=2,
        output_router_logits=True,
    )
    config._experts_implementation = "batched_mm"
    with torch.device(CARD):
        model = MixtralForCausalLM(config)
    model.gradient_checkpointing_enable({"use_reentrant": False})  # type: ignore[no-untyped-call]
    batch = (tokens(), tokens())
    with torch.no_grad():
        own_loss(model.train(), *batch)
    return fit(model, own_loss, batch)

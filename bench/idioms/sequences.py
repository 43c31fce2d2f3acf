"""Idioms of models of series, graphs and tokens."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bench.idioms.models import Wrap, next_token, series, tokens
from bench.idioms.registry import model_idiom


@model_idiom(series)
def gru() -> nn.Module:
    return Wrap(
        lambda m, x: m.head(m.body(x)[0][:, -1]),
        body=nn.GRU(6, 5, batch_first=True),
        head=nn.Linear(5, 4),
    )


@model_idiom(series)
def lstm() -> nn.Module:
    return Wrap(
        lambda m, x: m.head(m.body(x)[0][:, -1]),
        body=nn.LSTM(6, 5, batch_first=True),
        head=nn.Linear(5, 4),
    )


@model_idiom(series)
def recurrent_cell_in_a_loop() -> nn.Module:
    def forward(m: Any, x: Tensor) -> Tensor:
        h = x.new_zeros(len(x), 5)
        for t in range(x.shape[1]):
            h = m.cell(x[:, t], h)
        return m.head(h)  # type: ignore[no-any-return]

    return Wrap(forward, cell=nn.GRUCell(6, 5), head=nn.Linear(5, 4))


@model_idiom(series)
def state_space_scan() -> nn.Module:
    def forward(m: Any, x: Tensor) -> Tensor:
        decay, u, h, out = m.decay.sigmoid(), m.body(x), 0.0, []
        for t in range(x.shape[1]):
            h = decay * h + u[:, t]
            out.append(h)
        return m.head(torch.stack(out, 1).mean(1))  # type: ignore[no-any-return]

    model = Wrap(forward, body=nn.Linear(6, 5), head=nn.Linear(5, 4))
    model.decay = nn.Parameter(torch.zeros(5))
    return model


@model_idiom(series)
def linear_attention() -> nn.Module:
    def forward(m: Any, x: Tensor) -> Tensor:
        q, k, v = m.qkv(x).chunk(3, -1)
        context = torch.einsum("btd,bte->bde", k.softmax(1), v)
        return m.head(torch.einsum("btd,bde->bte", q.softmax(-1), context).mean(1))  # type: ignore[no-any-return]

    return Wrap(forward, qkv=nn.Linear(6, 18), head=nn.Linear(6, 4))


@model_idiom(series)
def attention_by_hand() -> nn.Module:
    def forward(m: Any, x: Tensor) -> Tensor:
        q, k, v = m.qkv(x).chunk(3, -1)
        scores = (q @ k.transpose(1, 2) / 6**0.5).masked_fill(
            torch.ones(5, 5).triu(1).bool(), -torch.inf
        )
        return m.head((scores.softmax(-1) @ v).mean(1))  # type: ignore[no-any-return]

    return Wrap(forward, qkv=nn.Linear(6, 18), head=nn.Linear(6, 4))


@model_idiom(series)
def causal_attention() -> nn.Module:
    def forward(m: Any, x: Tensor) -> Tensor:
        q, k, v = (t.unflatten(-1, (2, 3)).transpose(1, 2) for t in m.qkv(x).chunk(3, -1))
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return m.head(out.transpose(1, 2).flatten(2).mean(1))  # type: ignore[no-any-return]

    return Wrap(forward, qkv=nn.Linear(6, 18), head=nn.Linear(6, 4))


@model_idiom(series)
def attention_with_dropout() -> nn.Module:
    def forward(m: Any, x: Tensor) -> Tensor:
        q, k, v = (t.unflatten(-1, (2, 3)).transpose(1, 2) for t in m.qkv(x).chunk(3, -1))
        out = F.scaled_dot_product_attention(q, k, v, dropout_p=0.2)
        return m.head(out.transpose(1, 2).flatten(2).mean(1))  # type: ignore[no-any-return]

    return Wrap(forward, qkv=nn.Linear(6, 18), head=nn.Linear(6, 4))


def _freeze_zero_gradients(layer: nn.TransformerEncoderLayer) -> None:
    """Freeze the bias of keys: its gradient is zero but for rounding, which Adagrad blows up."""
    layer.self_attn.in_proj_bias.requires_grad_(False)


@model_idiom(series)
def multi_head_attention_module() -> nn.Module:
    return Wrap(
        lambda m, x: m.head(m.body(x, x, x, need_weights=False)[0].mean(1)),
        body=nn.MultiheadAttention(6, 2, batch_first=True, bias=False),
        head=nn.Linear(6, 4),
    )


@model_idiom(series)
def transformer_encoder_layer() -> nn.Module:
    layer = nn.TransformerEncoderLayer(6, 2, 8, dropout=0.0, batch_first=True)
    _freeze_zero_gradients(layer)
    return Wrap(lambda m, x: m.head(m.body(x).mean(1)), body=layer, head=nn.Linear(6, 4))


@model_idiom(series)
def transformer_encoder_with_dropout() -> nn.Module:
    layer = nn.TransformerEncoderLayer(6, 2, 8, dropout=0.2, batch_first=True, norm_first=True)
    _freeze_zero_gradients(layer)
    return Wrap(lambda m, x: m.head(m.body(x).mean(1)), body=layer, head=nn.Linear(6, 4))


@model_idiom(series)
def rotary_positions() -> nn.Module:
    def forward(m: Any, x: Tensor) -> Tensor:
        h = m.body(x)
        angle = torch.arange(5, dtype=x.dtype)[:, None] * torch.tensor([1.0, 0.1, 0.01]).to(x.dtype)
        a, b = h.chunk(2, -1)
        turned = torch.cat(
            [a * angle.cos() - b * angle.sin(), a * angle.sin() + b * angle.cos()], -1
        )
        return m.head(turned.mean(1))  # type: ignore[no-any-return]

    return Wrap(forward, body=nn.Linear(6, 6), head=nn.Linear(6, 4))


@model_idiom(series)
def temporal_convolution() -> nn.Module:
    def forward(m: Any, x: Tensor) -> Tensor:
        return m.head(m.body(F.pad(x.transpose(1, 2), (2, 0))).mean(-1))  # type: ignore[no-any-return]

    return Wrap(forward, body=nn.Conv1d(6, 5, 3), head=nn.Linear(5, 4))


@model_idiom(series)
def graph_convolution() -> nn.Module:
    def forward(m: Any, x: Tensor) -> Tensor:
        near = (torch.cdist(x, x) < 3).to(x.dtype)
        return m.head((near / near.sum(-1, keepdim=True)) @ m.body(x)).mean(1)  # type: ignore[no-any-return]

    return Wrap(forward, body=nn.Linear(6, 5), head=nn.Linear(5, 4))


@model_idiom(series)
def messages_by_scatter() -> nn.Module:
    def forward(m: Any, x: Tensor) -> Tensor:
        h = m.body(x)
        to = torch.tensor([0, 0, 1, 1, 2])
        return m.head(torch.zeros(len(x), 3, 5, dtype=x.dtype).index_add(1, to, h).sum(1))  # type: ignore[no-any-return]

    return Wrap(forward, body=nn.Linear(6, 5), head=nn.Linear(5, 4))


@model_idiom(series)
def attention_pooling() -> nn.Module:
    def forward(m: Any, x: Tensor) -> Tensor:
        return m.head((m.score(x).softmax(1) * x).sum(1))  # type: ignore[no-any-return]

    return Wrap(forward, score=nn.Linear(6, 1), head=nn.Linear(6, 4))


def _language_model(body: nn.Module | None = None, *, tied: bool = False) -> nn.Module:
    parts = [nn.Embedding(16, 8), body or nn.Tanh(), nn.Linear(8, 16, bias=False)]
    if tied:
        parts[2].weight = parts[0].weight  # type: ignore[assignment]
    return nn.Sequential(*parts)


@model_idiom(tokens, next_token)
def embedding() -> nn.Module:
    return _language_model()


@model_idiom(tokens, next_token)
def tied_embedding() -> nn.Module:
    return _language_model(tied=True)


@model_idiom(tokens, next_token)
def embedding_with_padding() -> nn.Module:
    return nn.Sequential(nn.Embedding(16, 8, padding_idx=0), nn.Tanh(), nn.Linear(8, 16))


@model_idiom(tokens, next_token)
def embedding_scaled_by_frequency() -> nn.Module:
    return nn.Sequential(nn.Embedding(16, 8, scale_grad_by_freq=True), nn.Tanh(), nn.Linear(8, 16))


@model_idiom(tokens, next_token)
def learned_positions() -> nn.Module:
    model = Wrap(
        lambda m, x: m.head(m.table(x) + m.positions[: x.shape[1]]),
        table=nn.Embedding(16, 8),
        head=nn.Linear(8, 16),
    )
    model.positions = nn.Parameter(torch.zeros(9, 8))
    return model


@model_idiom(tokens, next_token)
def one_hot_in_place_of_embedding() -> nn.Module:
    return Wrap(
        lambda m, x: m.head(F.one_hot(x, 16).to(m.head.weight.dtype)), head=nn.Linear(16, 16)
    )


@model_idiom(tokens, next_token)
def token_dropout() -> nn.Module:
    def forward(m: Any, x: Tensor) -> Tensor:
        kept = torch.rand(x.shape) > 0.2
        return m.head(m.table(torch.where(kept, x, 0)))  # type: ignore[no-any-return]

    return Wrap(forward, table=nn.Embedding(16, 8), head=nn.Linear(8, 16))


@model_idiom(tokens, next_token)
def bag_of_words() -> nn.Module:
    return Wrap(
        lambda m, x: m.head(m.table(x))[:, None].expand(-1, 5, -1),
        table=nn.EmbeddingBag(16, 8, mode="mean"),
        head=nn.Linear(8, 16),
    )


@model_idiom(tokens, next_token)
def float32_head_on_float64_body() -> nn.Module:
    return Wrap(
        lambda m, x: m.head(m.table(x).float()).double(),
        table=nn.Embedding(16, 8),
        head=_Float32(8, 16),
    )


class _Float32(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight.float(), self.bias.float())

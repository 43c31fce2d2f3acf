"""Extract, against hand arithmetic, the ZeRO-Offload paper's table, and steps traced again."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import sympy
import torch
from torch import nn
from torch.nn import functional as F
from transformers import LlamaConfig, LlamaForCausalLM

import cotrain_compile
from cotrain_compile.analysis.liveness import liveness
from cotrain_compile.analysis.symbolic import at, largest, peak_expression
from cotrain_compile.dataflow import Dataflow, Phase, Role

EXAMPLES = Path(__file__).parents[3] / "docs" / "examples"
Build = Callable[[], tuple[Callable[..., Any], tuple[Any, ...]]]


def perceptron(width: int = 64, batch: int = 8, *, autocast: bool = False) -> Build:
    def build() -> tuple[Callable[..., Any], tuple[Any, ...]]:
        model = nn.Sequential(
            nn.Linear(width, 4 * width, bias=False),
            nn.GELU(),
            nn.Linear(4 * width, width, bias=False),
        )
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

        def step(x: torch.Tensor) -> torch.Tensor:
            optimizer.zero_grad()
            with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
                loss: torch.Tensor = model(x).float().square().mean()
            loss.backward()
            optimizer.step()
            return loss

        return step, (torch.randn(batch, width),)

    return build


def llama(config: LlamaConfig, batch: int, length: int) -> Build:
    def build() -> tuple[Callable[..., Any], tuple[Any, ...]]:
        model = LlamaForCausalLM(config)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)

        def step(tokens: torch.Tensor) -> torch.Tensor:
            optimizer.zero_grad()
            logits = model(input_ids=tokens).logits
            loss = F.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            return loss

        return step, (torch.randint(0, config.vocab_size, (batch, length)),)

    return build


def saved_for_backward(dataflow: Dataflow) -> int:
    """Bytes of temporaries that the forward makes and the backward still reads."""
    written: dict[str, Phase] = {}
    touched: dict[str, Phase] = {}
    for op in dataflow.ops:
        for name in op.writes:
            written.setdefault(name, op.phase)
        for name in (*op.reads, *op.writes):
            touched[name] = op.phase
    return sum(
        buffer.nbytes
        for buffer in dataflow.buffers
        if buffer.role is Role.TEMPORARY
        and written[buffer.name] is Phase.FORWARD
        and touched[buffer.name] is Phase.BACKWARD
    )


def llama_parameters(config: LlamaConfig) -> int:
    hidden, inner = config.hidden_size, config.intermediate_size
    layer = 4 * hidden * hidden + 3 * hidden * inner + 2 * hidden
    return config.num_hidden_layers * layer + 2 * config.vocab_size * hidden + hidden


def llama_activation_bytes(config: LlamaConfig, batch: int, length: int) -> int:
    """What autograd keeps of a float32 Llama with fused attention, counted by hand."""
    hidden, inner, heads = config.hidden_size, config.intermediate_size, config.num_attention_heads
    tokens = batch * length
    # Of each of the two norms: its input, the inverse deviation, the normed and the scaled value.
    norm = tokens * (3 * hidden + 1)
    # Rotated query and key, value and output of the attention; its log-sum-exp; no mask.
    attention = tokens * (4 * hidden + heads)
    # The gate before and after its activation, the other projection, and their product.
    perceptron = tokens * 4 * inner
    layers = config.num_hidden_layers * (2 * norm + attention + perceptron)
    rotary = 2 * length * (hidden // heads)
    predicted_tokens = batch * (length - 1)
    log_probabilities = predicted_tokens * config.vocab_size
    labels = predicted_tokens * 8  # int64, made contiguous
    total_weight = 4
    return 4 * (layers + norm + rotary + log_probabilities) + labels + total_weight


def llama_flops(config: LlamaConfig, batch: int, length: int) -> int:
    """Matrix products, counted by hand: 2 flops forward and 4 backward a weight and token."""
    hidden, inner = config.hidden_size, config.intermediate_size
    layer = 4 * hidden * hidden + 3 * hidden * inner
    weights = config.num_hidden_layers * layer + config.vocab_size * hidden
    # Fused attention: two products forward; in the backward one again and four gradients. It is
    # causal: each position meets itself and those before it.
    pairs = batch * length * (length + 1) // 2
    attention = config.num_hidden_layers * (2 + 5) * 2 * pairs * hidden
    return 6 * weights * batch * length + attention


SMALL = LlamaConfig(
    hidden_size=64,
    intermediate_size=176,
    num_hidden_layers=2,
    num_attention_heads=4,
    vocab_size=512,
    use_cache=False,
)


def llama_7b(**changes: int) -> LlamaConfig:
    """The one of the documentation's example, with other settings where they are given."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(EXAMPLES)
        config: LlamaConfig = importlib.import_module("llama").LLAMA_7B
    return LlamaConfig.from_dict({**config.to_dict(), **changes})


@pytest.mark.parametrize(
    ("config", "batch", "length"),
    [
        pytest.param(SMALL, 2, 32, marks=pytest.mark.long),
        pytest.param(SMALL, 3, 48, marks=pytest.mark.long),
        (llama_7b(num_hidden_layers=1), 4, 2048),
        pytest.param(llama_7b(), 4, 2048, marks=pytest.mark.long),
    ],
    ids=["small", "small, other shape", "one layer of 7B", "7B"],
)
def test_a_llama_step_has_the_bytes_that_hand_arithmetic_gives(
    config: LlamaConfig, batch: int, length: int
) -> None:
    dataflow = cotrain_compile.trace(llama(config, batch, length))
    parameters = llama_parameters(config)
    tensors = 2 + 1 + 9 * config.num_hidden_layers
    assert dataflow.total_bytes(Role.PARAM) == 4 * parameters
    # Two moments for each parameter and a step count of four bytes for each tensor.
    assert dataflow.total_bytes(Role.OPTIMIZER_STATE) == 8 * parameters + 4 * tensors
    assert saved_for_backward(dataflow) == llama_activation_bytes(config, batch, length)
    assert len(dataflow.updates) == tensors
    assert {group.param for group in dataflow.updates} >= {"lm_head.weight", "model.norm.weight"}
    assert sum(op.flops for op in dataflow.ops) == llama_flops(config, batch, length)


def test_a_step_is_known_by_its_model_and_its_ops_by_the_line_that_called_them() -> None:
    """The innermost outside torch: of the layer in `nn.Sequential` that is the user's own."""
    build = perceptron(width=16)
    step = cotrain_compile.trace(build)
    here = Path(__file__).read_text().splitlines()
    called = here.index("                loss: torch.Tensor = model(x).float().square().mean()") + 1
    mms = [op for op in step.ops if op.target == "aten.mm.default"]
    assert [op.line for op in mms[:2]] == 2 * [f"{Path(__file__).name}:{called}"]
    assert (step.job.model, step.job.batch) == ("Sequential", {"x": (8, 16)})


def test_tracing_under_fake_tensors_gives_the_step_that_runs() -> None:
    """The same fingerprint: a plan made offline is a plan for the real step."""
    traced = cotrain_compile.trace(perceptron())
    torch.manual_seed(0)
    step, arguments = perceptron()()
    compiled = torch.compile(step, backend="cotrain")
    compiled(*arguments)
    placed = cotrain_compile.inspect(compiled)
    assert traced == placed.problem.dataflow
    assert placed.predict_steps(4).period_s == pytest.approx(placed.predicted.makespan_s)


def test_under_autocast_the_narrow_gradient_is_what_leaves_the_backward() -> None:
    dataflow = cotrain_compile.trace(perceptron(autocast=True))
    for group in dataflow.updates:
        parameter = dataflow.buffer[group.param]
        assert dataflow.buffer[group.gradient].nbytes * 2 == parameter.nbytes
        assert dataflow.buffer[group.low_precision].nbytes * 2 == parameter.nbytes


@pytest.mark.parametrize(
    ("optimizer", "dtype", "has_loop"),
    [
        (torch.optim.AdamW, torch.float32, True),
        (functools.partial(torch.optim.SGD, momentum=0.9), torch.float32, True),
        (torch.optim.AdamW, torch.bfloat16, False),
        (functools.partial(torch.optim.AdamW, fused=True), torch.bfloat16, True),
        (functools.partial(torch.optim.AdamW, fused=True), torch.float16, False),
        (functools.partial(torch.optim.SGD, fused=True), torch.bfloat16, False),
        (torch.optim.RMSprop, torch.float32, False),
    ],
    ids=[
        "AdamW",
        "SGD with momentum",
        "AdamW on bfloat16",
        "fused",
        "fused float16",
        "fused SGD",
        "RMSprop",
    ],
)
def test_an_update_says_whether_the_host_has_a_fused_loop_for_it(
    optimizer: Callable[..., torch.optim.Optimizer], dtype: torch.dtype, has_loop: bool
) -> None:
    def build() -> tuple[Callable[..., Any], tuple[Any, ...]]:
        model = nn.Linear(4, 4, dtype=dtype)
        rule = optimizer(model.parameters(), lr=1e-3)

        def step(x: torch.Tensor) -> torch.Tensor:
            rule.zero_grad()
            loss: torch.Tensor = model(x).square().mean()
            loss.backward()
            rule.step()
            return loss

        return step, (torch.randn(2, 4, dtype=dtype),)

    updates = cotrain_compile.trace(build).updates
    assert [group.has_loop for group in updates] == [has_loop, has_loop]


@functools.cache
def dynamic_perceptron() -> Dataflow:
    return cotrain_compile.trace(perceptron(batch=8), dynamic=True)


def test_sizes_of_a_dynamic_batch_agree_with_a_step_traced_at_that_batch() -> None:
    dynamic = dynamic_perceptron()
    (symbol,) = (name for name, size in dynamic.symbols.items() if size == 8)
    others = {name: size for name, size in dynamic.symbols.items() if name != symbol}
    peak = peak_expression(dynamic)
    for batch in (4, 24):
        static = cotrain_compile.trace(perceptron(batch=batch))
        resized = at(dynamic, {symbol: batch, **others})
        assert resized.total_bytes(Role.TEMPORARY) == static.total_bytes(Role.TEMPORARY)
        assert liveness(resized).peak_bytes == liveness(static).peak_bytes
        values = {sympy.Symbol(n, positive=True, integer=True): s for n, s in others.items()}
        values[sympy.Symbol(symbol, positive=True, integer=True)] = batch
        assert int(peak.subs(values)) == liveness(static).peak_bytes


def test_the_largest_batch_fits_and_the_next_one_does_not() -> None:
    dynamic = dynamic_perceptron()
    (symbol,) = (name for name, size in dynamic.symbols.items() if size == 8)
    budget = 2 * liveness(dynamic).peak_bytes
    batch = largest(dynamic, symbol, budget)
    assert liveness(cotrain_compile.trace(perceptron(batch=batch))).peak_bytes <= budget
    assert liveness(cotrain_compile.trace(perceptron(batch=batch + 1))).peak_bytes > budget


def test_gradients_of_micro_batches_are_added_up_at_once() -> None:
    """With two micro-batches one set of gradients is alive, and one more gradient at a time."""

    def build() -> tuple[Callable[..., Any], tuple[Any, ...]]:
        model = nn.Sequential(*[nn.Linear(256, 256, bias=False) for _ in range(8)])
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

        def step(x: torch.Tensor) -> torch.Tensor:
            optimizer.zero_grad()
            total = torch.zeros(())
            for half in x.chunk(2):
                loss = model(half).square().mean()
                loss.backward()
                total += loss.detach()
            optimizer.step()
            return total

        return step, (torch.randn(4, 256),)

    dataflow = cotrain_compile.trace(build)
    parameters = dataflow.total_bytes(Role.PARAM)
    gradients = liveness(dataflow).peak_bytes - parameters
    assert parameters <= gradients < 1.5 * parameters


def test_tied_weights_are_one_buffer() -> None:
    def build() -> tuple[Callable[..., Any], tuple[Any, ...]]:
        embedding = nn.Embedding(50, 16)
        head = nn.Linear(16, 50, bias=False)
        head.weight = embedding.weight
        optimizer = torch.optim.SGD(embedding.parameters(), lr=0.1)

        def step(x: torch.Tensor) -> torch.Tensor:
            optimizer.zero_grad()
            loss: torch.Tensor = head(embedding(x)).square().mean()
            loss.backward()
            optimizer.step()
            return loss

        return step, (torch.randint(0, 50, (4, 8)),)

    dataflow = cotrain_compile.trace(build)
    (parameter,) = (b for b in dataflow.buffers if b.role is Role.PARAM)
    assert parameter.nbytes == 50 * 16 * 4
    assert len(dataflow.updates) == 1


def test_parameters_in_one_storage_are_one_buffer_that_stays_on_the_device() -> None:
    def build() -> tuple[Callable[..., Any], tuple[Any, ...]]:
        both = torch.randn(2, 16)
        scale, shift, alone = (nn.Parameter(t) for t in (both[0], both[1], torch.randn(16)))
        optimizer = torch.optim.Adam([scale, shift, alone])

        def step(x: torch.Tensor) -> torch.Tensor:
            optimizer.zero_grad()
            loss: torch.Tensor = ((x * scale + shift) * alone).square().mean()
            loss.backward()
            optimizer.step()
            return loss

        return step, (torch.randn(4, 16),)

    dataflow = cotrain_compile.trace(build)
    sizes = {b.name: b.nbytes for b in dataflow.buffers if b.role is Role.PARAM}
    assert sorted(sizes.values()) == [16 * 4, 2 * 16 * 4]
    assert [sizes[group.param] for group in dataflow.updates] == [16 * 4]


def test_an_op_that_hides_an_alias_is_refused_by_name() -> None:
    library = torch.library.Library("extract_test", "FRAGMENT")
    library.define("sly(Tensor x) -> Tensor")
    library.impl("sly", lambda x: x, "CompositeExplicitAutograd")
    library.impl("sly", lambda x: x, "Meta")

    def build() -> tuple[Callable[..., Any], tuple[Any, ...]]:
        weight = nn.Parameter(torch.randn(4))
        optimizer = torch.optim.SGD([weight], lr=0.1)

        def step(x: torch.Tensor) -> torch.Tensor:
            optimizer.zero_grad()
            loss: torch.Tensor = (weight * torch.ops.extract_test.sly(x)).sum()
            loss.backward()
            optimizer.step()
            return loss

        return step, (torch.randn(4),)

    with pytest.raises(cotrain_compile.errors.ExtractError, match=r"extract_test\.sly.*alias"):
        cotrain_compile.trace(build)


def test_a_model_whose_initialisation_looks_at_its_values_is_built_without_them() -> None:
    draw = nn.init.trunc_normal_  # as a library keeps it under another name

    def build() -> tuple[Callable[..., Any], tuple[Any, ...]]:
        weight = nn.Parameter(draw(torch.empty(8, 4), std=0.02))
        optimizer = torch.optim.SGD([weight], lr=0.1)

        def step(x: torch.Tensor) -> torch.Tensor:
            optimizer.zero_grad()
            loss: torch.Tensor = (x @ weight.t()).square().mean()
            loss.backward()
            optimizer.step()
            return loss

        return step, (torch.randn(2, 4),)

    assert len(cotrain_compile.trace(build).updates) == 1
    assert nn.init.trunc_normal_(torch.empty(64)).std() > 0.5  # outside, values are drawn

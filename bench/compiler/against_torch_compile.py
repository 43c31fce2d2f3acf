"""With everything resident, how does a step lowered with Inductor compare with stock torch.compile?

Stock is the arrangement that torch offers: the model with its loss compiled, and `optimizer.step`.
Both sides train the same model in one process and on one thread, in turns. Beside wall time there
is the time of the processor, which other programs on the machine disturb less, and the part of it
that the operating system took: pages for memory that was given back and is wanted again. With
--keep-memory nothing is given back, as with the allocator of a card. Peaks are what torch's CPU
allocator gave out at most in a step, with what was there before.

python -m bench.compiler.against_torch_compile gpt2-124m \\
    -o bench/results/against_torch_compile_gpt2.json
"""

from __future__ import annotations

import argparse
import os
import resource
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from rich.console import Console
from torch import Tensor, nn
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

import cotrain_compile
from bench.report import write_report
from cotrain_compile.backends.inductor.lower import segments_of
from cotrain_compile.entry.tracing import trace_graph
from cotrain_compile.extract.extract import extract
from cotrain_compile.runtime.allocations import most_allocated

Step = Callable[[Tensor], Tensor]
BATCH, LENGTH = 2, 256
LEARNING_RATE = 1e-4
WARM_UP, ROUNDS = 2, 5
# glibc reads them as a process begins: free memory stays, and blocks of any size are taken from it.
KEEP_MEMORY = {"MALLOC_TRIM_THRESHOLD_": str(1 << 40), "MALLOC_MMAP_THRESHOLD_": str(1 << 40)}
OURS = {"policy": "resident", "lowering": "inductor", "poison": False}


def gpt2(layers: int = 12) -> nn.Module:
    """GPT-2 124M, as for pretraining without dropout."""
    return GPT2LMHeadModel(
        GPT2Config(n_layer=layers, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, use_cache=False)
    )


def llama(layers: int = 6) -> nn.Module:
    """A Llama of 66 million parameters in 6 layers."""
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=16384,
            hidden_size=768,
            intermediate_size=2048,
            num_hidden_layers=layers,
            num_attention_heads=12,
            use_cache=False,
        )
    )


MODELS: dict[str, Callable[..., nn.Module]] = {"gpt2-124m": gpt2, "llama-6-layers": llama}


def loss_of(model: nn.Module, tokens: Tensor) -> Tensor:
    """Mean cross entropy of the next token."""
    logits = model(input_ids=tokens).logits
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())


@dataclass(frozen=True)
class Side:
    """A model, its optimizer and a step that trains it."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    step: Step

    def held_bytes(self, tokens: Tensor) -> int:
        """Bytes of parameters, buffers, states and batch."""
        params = list(self.model.parameters())
        states = [v for state in self.optimizer.state.values() for v in state.values()]
        buffers = list(self.model.buffers())
        storages = {
            t.untyped_storage()._cdata: t.untyped_storage().nbytes()
            for t in (*params, *states, *buffers, tokens)
        }
        return sum(storages.values())

    def peak_bytes(self, tokens: Tensor) -> int:
        """Most bytes alive during one step."""
        self.optimizer.zero_grad()  # of what was there before, the allocator reports no end
        return self.held_bytes(tokens) + most_allocated(lambda: self.step(tokens))[1]


def plain_step(model: nn.Module, optimizer: torch.optim.Optimizer) -> Step:
    """The step as a user writes it."""

    def step(tokens: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss = loss_of(model, tokens)
        loss.backward()
        optimizer.step()
        return loss

    return step


def ours(make: Callable[[], nn.Module]) -> Side:
    """The whole step compiled by this package."""
    model = make()
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE)
    step = torch.compile(plain_step(model, optimizer), backend="cotrain", options=OURS)
    return Side(model, optimizer, step)


def stock(make: Callable[[], nn.Module]) -> Side:
    """Model and loss in one compiled function, the optimizer in another."""
    model = make()
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE)
    compiled_loss = torch.compile(lambda tokens: loss_of(model, tokens))
    update = torch.compile(optimizer.step)

    def step(tokens: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss = compiled_loss(tokens)
        loss.backward()
        update()
        return loss.detach()

    return Side(model, optimizer, step)


SIDES = {"ours": ours, "stock": stock}


def tokens_for(model: nn.Module) -> Tensor:
    """A batch of random tokens."""
    vocabulary: int = model.config.vocab_size  # type: ignore[union-attr, assignment]
    return torch.randint(0, vocabulary, (BATCH, LENGTH))


def make_side(name: str, model: str) -> tuple[Side, Tensor]:
    """One side with its batch, the same for both."""
    torch.manual_seed(0)
    side = SIDES[name](MODELS[model])
    torch.manual_seed(1)
    return side, tokens_for(side.model)


def compare(model: str) -> dict[str, Any]:
    """Step times in turns, peaks and losses of both sides."""
    sides = {name: make_side(name, model) for name in SIDES}
    losses: dict[str, list[float]] = {name: [] for name in SIDES}
    seconds: dict[str, list[float]] = {name: [] for name in SIDES}
    processor_s: dict[str, list[float]] = {name: [] for name in SIDES}
    system_s: dict[str, list[float]] = {name: [] for name in SIDES}
    for round_ in range(WARM_UP + ROUNDS):
        for name, (side, tokens) in sides.items():
            began = resource.getrusage(resource.RUSAGE_SELF)
            began_s = time.perf_counter()
            losses[name].append(side.step(tokens).item())
            if round_ >= WARM_UP:
                seconds[name].append(time.perf_counter() - began_s)
                ended = resource.getrusage(resource.RUSAGE_SELF)
                system_s[name].append(ended.ru_stime - began.ru_stime)
                processor_s[name].append(system_s[name][-1] + ended.ru_utime - began.ru_utime)
    peaks = {name: side.peak_bytes(tokens) for name, (side, tokens) in sides.items()}
    compiled = cotrain_compile.inspect(sides["ours"][0].step)
    assert compiled.lowered is not None and compiled.measured is not None
    return {
        "seconds": seconds,
        "processor_s": processor_s,
        "system_s": system_s,
        "time_ratio": ratios(seconds),
        "processor_time_ratio": ratios(processor_s),
        "peak_bytes": peaks,
        "peak_ratio": peaks["ours"] / peaks["stock"],
        "predicted_peak_bytes": compiled.predicted.peak_bytes["device"],  # type: ignore[index]
        "metered_peak_bytes": compiled.measured.peak_bytes["device"],  # type: ignore[index]
        "largest_difference_of_losses": max(
            abs(a - b) for a, b in zip(losses["ours"], losses["stock"], strict=True)
        ),
        "segments": len(compiled.lowered.code),
        "kinds": compiled.lowered.kinds,
    }


def ratios(seconds: dict[str, list[float]]) -> dict[str, float]:
    """Ours to stock: of the medians, of the minima, and the median over the rounds."""
    a, b = seconds["ours"], seconds["stock"]
    return {
        "of_medians": statistics.median(a) / statistics.median(b),
        "of_minima": min(a) / min(b),
        "median_of_rounds": statistics.median(x / y for x, y in zip(a, b, strict=True)),
    }


def kinds(model: str) -> dict[str, dict[str, int]]:
    """Segments, and different ones, of models of 6 and of 24 layers."""
    found = {}
    for layers in (6, 24):

        def build(layers: int = layers) -> tuple[Step, tuple[Tensor]]:
            made = MODELS[model](layers)
            optimizer = torch.optim.AdamW(made.parameters(), lr=LEARNING_RATE)
            return plain_step(made, optimizer), (tokens_for(made),)

        step = trace_graph(build)
        segments = segments_of(step, step, extract(step)).segments.values()
        different = len({segment.key for segment in segments})
        found[str(layers)] = {"segments": len(segments), "kinds": different}
    return found


def main() -> None:
    """Measure, print, and write the report."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", choices=list(MODELS))
    parser.add_argument("--keep-memory", action="store_true", help="glibc keeps what is freed")
    parser.add_argument("-o", "--output", type=Path)
    arguments = parser.parse_args()
    if arguments.keep_memory and not KEEP_MEMORY.items() <= os.environ.items():
        os.execve(sys.executable, sys.orig_argv, {**os.environ, **KEEP_MEMORY})
    torch.set_num_threads(1)
    record = {**compare(arguments.model), "kinds_by_layers": kinds(arguments.model)}
    lists = ("seconds", "processor_s", "system_s")
    Console(soft_wrap=True).print({k: v for k, v in record.items() if k not in lists})
    name = f"{arguments.model}, memory kept" if arguments.keep_memory else arguments.model
    write_report(arguments.output, __doc__.splitlines()[0], {name: record})


if __name__ == "__main__":
    main()

"""Where do the seconds of a first step go, and what does a layer more cost? Beside stock's.

A GPT of width 16 with 4 and 12 layers, clipping and AdamW, each measure in a process of its own:
ours as it is, ours with every layer lowered and every update traced, and stock torch.compile of
model, loss and `optimizer.step` with its graphs run in eager. Nothing is compiled to kernels: what
is timed is what hangs on how many layers there are. Seconds are of the processor.

The smallest user's first call: the step with 4 layers, nothing on disk yet, in eager, under this
package as it comes, and stock with Inductor.

And models of Hugging Face's at their own sizes, traced without memory for them, with each layer in
a checkpoint and without.

    python -m bench.compiler.first_step -o bench/results/first_step.json
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from rich.console import Console
from torch import Tensor, nn

from bench.compiler.processor import ALONE, CACHES, processor_s
from bench.report import write_report
from cotrain_compile.capture.dynamo import patches
from cotrain_compile.capture.layers import lower
from cotrain_compile.demo.job import CharacterGPT, Shape
from cotrain_compile.entry.tracing import trace_graph
from cotrain_compile.extract.extract import extract
from cotrain_compile.support.collector import collector_off

LAYERS = (4, 12)


def model_and_batch(layers: int) -> tuple[nn.Module, Tensor]:
    """A model next to no computing, and its batch."""
    shape = Shape(characters=16, context=8, width=16, layers=layers, heads=2)
    return CharacterGPT(shape), torch.randint(16, (1, 9))


def loss_of(model: nn.Module, characters: Tensor) -> Tensor:
    """What is trained on: the next character."""
    logits = model(characters[:, :-1])
    return F.cross_entropy(logits.flatten(0, 1), characters[:, 1:].flatten())


def step_of(model: nn.Module) -> Callable[[Tensor], Tensor]:
    """Clipping and AdamW, as a user writes it."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    def step(characters: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss = loss_of(model, characters)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        return loss

    return step


def ours(layers: int) -> dict[str, Any]:
    """The step traced as it is."""

    def build() -> tuple[Callable[[Tensor], Tensor], tuple[Tensor]]:
        model, batch = model_and_batch(layers)
        return step_of(model), (batch,)

    return traced(build)


def called(layers: int, run_with: Callable[[Any], Any]) -> dict[str, Any]:
    """Seconds of the first call of a step, compilers that it starts included."""
    model, batch = model_and_batch(layers)
    run = run_with(step_of(model))
    began_s = processor_s()
    run(batch)
    return {"all": processor_s() - began_s}


def ours_called(step: Any) -> Any:
    """The step under this package as it comes."""
    return torch.compile(step, backend="cotrain", options={"quiet": True})


@collector_off()  # as `entry.tracing.trace` has it
def traced(build: Callable[[], tuple[Callable[[Tensor], Tensor], tuple[Tensor]]]) -> dict[str, Any]:
    """Seconds until a step is traced and what each of its ops costs is known; how many ops."""
    began_s = time.process_time()
    step = trace_graph(build)
    traced_s = time.process_time()
    extract(step)
    ended_s = time.process_time()
    return {"all": ended_s - began_s, "extract": ended_s - traced_s, "nodes": len(step.nodes)}


def ours_whole(layers: int) -> dict[str, Any]:
    """The step traced with nothing taken for known."""
    with (
        mock.patch.object(lower, "_parts", lambda *_: []),
        mock.patch.object(patches, "traced_once_a_kind", lambda *_: None),
    ):
        return ours(layers)


def stock(layers: int, backend: str = "aot_eager") -> dict[str, Any]:
    """Model with its loss, and the update, each compiled by torch and called once."""
    model, batch = model_and_batch(layers)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    compiled = torch.compile(loss_of, backend=backend)
    update = torch.compile(optimizer.step, backend=backend)
    began_s = processor_s()
    compiled(model, batch).backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    update()
    return {"all": processor_s() - began_s}


def configured(name: str) -> Any:
    """A model of Hugging Face's by what people call it, ready to train."""
    hf: Any = importlib.import_module("transformers")  # the small model needs none

    llama: Any = {"vocab_size": 32000, "use_cache": False}
    config: Any = {
        "GPT-2, 12 layers": lambda: hf.GPT2Config(use_cache=False),
        "GPT-2 XL, 48 layers": lambda: hf.GPT2Config(
            n_embd=1600, n_layer=48, n_head=25, use_cache=False
        ),
        "BERT-large, 24 layers": lambda: hf.BertConfig(
            hidden_size=1024, num_hidden_layers=24, num_attention_heads=16, intermediate_size=4096
        ),
        "Llama 7B, 32 layers": lambda: hf.LlamaConfig(**llama),
        "Llama 70B, 80 layers": lambda: hf.LlamaConfig(
            hidden_size=8192,
            intermediate_size=28672,
            num_hidden_layers=80,
            num_attention_heads=64,
            num_key_value_heads=8,
            **llama,
        ),
    }[name]()
    kind: Any = hf.AutoModelForMaskedLM if name.startswith("BERT") else hf.AutoModelForCausalLM
    return kind.from_config(config).train()


MODELS = (
    "GPT-2, 12 layers",
    "Llama 7B, 32 layers",
    "BERT-large, 24 layers",
    "GPT-2 XL, 48 layers",
    "Llama 70B, 80 layers",
)
WAYS = ("kept", "checkpoints")


def of_model(name: str, way: str) -> dict[str, Any]:
    """The step of a model traced, its layers in checkpoints or not."""

    def build() -> tuple[Callable[[Tensor], Tensor], tuple[Tensor]]:
        model = configured(name)
        if way == "checkpoints":
            enable = "activation_checkpointing_enable"  # an older one has "gradient_..." alone
            (getattr(model, enable, None) or model.gradient_checkpointing_enable)()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)

        def step(tokens: Tensor) -> Tensor:
            optimizer.zero_grad()
            loss: Tensor = model(input_ids=tokens, labels=tokens).loss
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            return loss

        return step, (torch.randint(30000, (1, 512)),)

    return traced(build)


SIDES = {"ours": ours, "ours, each layer": ours_whole, "stock": stock}
CALLED: dict[str, Callable[[int], dict[str, Any]]] = {
    "eager, called": lambda layers: called(layers, lambda step: step),
    "ours, called": lambda layers: called(layers, ours_called),
    "stock with Inductor, called": lambda layers: stock(layers, "inductor"),
}


def measured(side: str, of: str) -> dict[str, Any]:
    """One side of one depth, or one model in one way, in this process."""
    torch.set_num_threads(1)
    found = of_model(of, side) if side in WAYS else (SIDES | CALLED)[side](int(of))
    return {key: round(value, 2) for key, value in found.items()}


def in_a_process(side: str, of: str) -> dict[str, Any]:
    """As `measured`, in a process of its own."""
    command = [sys.executable, "-W", "ignore", "-m", "bench.compiler.first_step"]
    command += ["--side", side, "--of", of]
    with tempfile.TemporaryDirectory() as cache:
        folders = {f"{whose}_CACHE_DIR": cache for whose in CACHES}
        environment = {**os.environ, **ALONE, **folders}
        run = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if run.returncode:
        raise SystemExit(f"{side} of {of} failed:\n{run.stderr}")
    found: dict[str, Any] = json.loads(run.stdout.strip().splitlines()[-1])
    return found


def main() -> None:
    """Measure all sides and depths, and models; print and write the report."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("-o", "--output", type=Path)
    parser.add_argument("--layers", type=int, nargs="+", default=list(LAYERS))
    parser.add_argument("--models", nargs="*", choices=MODELS, default=list(MODELS))
    parser.add_argument("--jobs", type=int, default=1, help="measured at a time")
    parser.add_argument("--side", choices=[*SIDES, *CALLED, *WAYS], help="one measure, as JSON")
    parser.add_argument("--of", help="how many layers, or which model, with --side")
    arguments = parser.parse_args()
    if arguments.side:
        found = measured(arguments.side, arguments.of)
        sys.stdout.write(f"{json.dumps(found)}\n")
        return
    measure(arguments)


def measure(arguments: argparse.Namespace) -> None:
    """All that is asked for, and the report."""
    console = Console(soft_wrap=True)
    result: dict[str, dict[str, Any]] = {"layers": {}, "models": {}}
    measures = [("layers", side, str(n)) for n in arguments.layers for side in SIDES]
    measures += [("layers", side, str(min(arguments.layers))) for side in CALLED]
    measures += [("models", way, name) for name in arguments.models for way in WAYS]
    with ThreadPoolExecutor(arguments.jobs) as pool:
        found = pool.map(lambda one: in_a_process(one[1], one[2]), measures)
        for (table, side, of), seconds in zip(measures, found, strict=True):
            result[table].setdefault(side, {})[of] = seconds
            console.print(of, side, seconds)
            if arguments.output:
                write_report(arguments.output, (__doc__ or "").splitlines()[0], result)


if __name__ == "__main__":
    main()

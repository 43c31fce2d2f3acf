"""What do the five jobs take that a new user begins with?

Each is written as its framework's own pages have it, and run in a process of its own, in eager and
compiled within a budget: what counts is the processor time that the compiled run takes beyond
eager's, with nothing on disk. The fifth plans Llama 7B offline, by three commands.

    python -m bench.training.five_jobs -o bench/results/five_jobs.json
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import cotrain_compile
from bench.report import write_report

Step = Callable[..., Any]
Compiled = Callable[[Step], Step]
UPDATES = 8
WORDS, LENGTH = 256, 64
WIDTH, HEADS = 128, 4

# What jobs of these kinds took in the first trials, before 0.2.0: attempts, arguments, files and
# commands until they ran, and processor seconds beyond eager's, where somebody has noted them.
THEN: Mapping[str, tuple[int, float | None]] = {
    "a loop as nanoGPT's": (3, 42.0),
    "Hugging Face Trainer": (1, None),
    "Accelerate": (2, None),
    "Lightning Fabric": (4, None),
    "a plan of Llama 7B": (6, 274.0),
}
# Now: a function of the loop's body; a class; a function; a function and an argument; commands.
NOW = {
    "a loop as nanoGPT's": 1,
    "Hugging Face Trainer": 1,
    "Accelerate": 1,
    "Lightning Fabric": 2,
    "a plan of Llama 7B": 3,
}


def language_model() -> Any:
    """A Llama of four layers."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=WORDS,
            hidden_size=64,
            intermediate_size=128,
            num_hidden_layers=4,
            num_attention_heads=4,
        )
    )


def rows(count: int = 32) -> Any:
    """Samples of random tokens."""
    torch.manual_seed(1)
    return [{"input_ids": row, "labels": row} for row in torch.randint(WORDS, (count, LENGTH))]


class Layer(nn.Module):
    """Attention and an MLP, as GPT-2 has them."""

    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList([nn.LayerNorm(WIDTH, bias=False) for _ in range(2)])
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH, bias=False)
        self.out = nn.Linear(WIDTH, WIDTH, bias=False)
        self.wide = nn.Linear(WIDTH, 4 * WIDTH, bias=False)
        self.narrow = nn.Linear(4 * WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        heads = self.qkv(self.norms[0](x)).unflatten(2, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(heads[0], heads[1], heads[2], is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        return x + self.narrow(F.gelu(self.wide(self.norms[1](x))))  # type: ignore[no-any-return]


class Gpt(nn.Module):
    """Of the size of the first trial's: four layers, tied weights."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(2 * WORDS, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.layers = nn.Sequential(*[Layer() for _ in range(4)])
        self.norm = nn.LayerNorm(WIDTH, bias=False)
        self.head = nn.Linear(WIDTH, 2 * WORDS, bias=False)
        self.head.weight = self.tokens.weight

    def forward(self, tokens: Tensor) -> Tensor:
        places = self.places(torch.arange(tokens.shape[1]))
        return self.head(self.norm(self.layers(self.tokens(tokens) + places)))  # type: ignore[no-any-return]


def by_hand(compiled: Compiled) -> None:
    """Four micro-batches in a step, bfloat16, clipping, and a rate that is set by hand."""
    torch.manual_seed(0)
    model = Gpt()
    optimizer = torch.optim.AdamW(
        [
            {"params": [p for p in model.parameters() if p.dim() > 1], "weight_decay": 0.1},
            {"params": [p for p in model.parameters() if p.dim() < 2], "weight_decay": 0.0},
        ],
        lr=1e-3,
    )

    def train_step(batches: list[Tensor]) -> Tensor:
        optimizer.zero_grad(set_to_none=True)
        total = torch.zeros(())
        for x in batches:
            with torch.autocast("cpu", dtype=torch.bfloat16):
                loss = F.cross_entropy(model(x[:, :-1]).flatten(0, 1), x[:, 1:].flatten())
            (loss / len(batches)).backward()
            total = total + loss.detach()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        return total

    run = compiled(train_step)
    for number in range(UPDATES):
        for group in optimizer.param_groups:
            group["lr"] = 1e-3 * (1 + number) / UPDATES  # warms up, as there
        run([torch.randint(2 * WORDS, (2, LENGTH + 1)) for _ in range(4)])


def by_trainer(compiled: Compiled) -> None:
    """Accumulation and bfloat16 by the Trainer's own arguments."""
    from transformers import Trainer, TrainingArguments

    from cotrain_compile.integrations.transformers import CotrainTrainer

    settings = TrainingArguments(
        tempfile.mkdtemp(),
        per_device_train_batch_size=2,
        gradient_accumulation_steps=2,
        max_steps=UPDATES,
        bf16=True,
        use_cpu=True,
        report_to=[],
        save_strategy="no",
    )
    given = {"model": language_model(), "args": settings, "train_dataset": rows()}
    if compiled is _eager:
        Trainer(**given).train()
    else:
        CotrainTrainer(**given, cotrain=dict(OPTIONS)).train()


def by_accelerate(compiled: Compiled) -> None:
    """As in Accelerate's quick tour, under `accumulate`."""
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2, mixed_precision="bf16")
    model = language_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    loader = torch.utils.data.DataLoader(rows(), batch_size=2)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)

    def step(batch: dict[str, Tensor]) -> Tensor:
        loss: Tensor = model(**batch).loss
        accelerator.backward(loss)
        if accelerator.sync_gradients:
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    run = compiled(step)
    for batch in loader:
        with accelerator.accumulate(model):
            run(batch)


def by_fabric(compiled: Compiled) -> None:
    """Fabric's model, optimizer, backward and clipping."""
    from lightning_fabric import Fabric

    fabric = Fabric(accelerator="cpu", devices=1, precision="bf16-mixed")
    model = language_model()
    model, optimizer = fabric.setup(model, torch.optim.AdamW(model.parameters(), lr=1e-3))
    loader = fabric.setup_dataloaders(torch.utils.data.DataLoader(rows(), batch_size=4))

    def step(batch: dict[str, Tensor]) -> Tensor:
        optimizer.zero_grad()
        loss: Tensor = model(**batch).loss
        fabric.backward(loss)
        fabric.clip_gradients(model, optimizer, max_norm=1.0, error_if_nonfinite=False)
        optimizer.step()
        return loss.detach()

    run = compiled(step)
    for batch in loader:
        run(batch)


JOBS: Mapping[str, Callable[[Compiled], None]] = {
    "a loop as nanoGPT's": by_hand,
    "Hugging Face Trainer": by_trainer,
    "Accelerate": by_accelerate,
    "Lightning Fabric": by_fabric,
}
# As in the first trials: the model, its gradients and states take more.
OPTIONS: Mapping[str, Any] = {"memory_budget": "6MiB", "quiet": True}
COMMANDS = (
    "trace config.json --batch 4 --length 2048 --machine rtx4090 -o step.json",
    "solve step.json --machine rtx4090 --memory-budget 20GiB --host-memory 128GiB -o plan.json",
    "show plan.json --html report.html",
)
LLAMA_7B = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "vocab_size": 32000,
    "use_cache": False,
}


def _eager(step: Step) -> Step:
    return step


def _compiled(step: Step) -> Step:
    return cotrain_compile.compile(step, **OPTIONS)


def processor_s(command: Sequence[str], folder: Path) -> float:
    """Of a process and its children, with no cache of another one.

    With one thread each: on a busy computer others take processor time to wait for one another.
    """
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    caches = {
        "COTRAIN_CACHE_DIR": str(folder / "plans"),
        "TORCHINDUCTOR_CACHE_DIR": str(folder / "code"),
        "OMP_NUM_THREADS": "1",
    }
    environment = {**os.environ, **caches, "PYTHONPATH": str(Path(__file__).parents[2])}
    subprocess.run(command, cwd=folder, env=environment, check=True, stdout=subprocess.DEVNULL)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def measured(job: str) -> dict[str, float]:
    """Processor seconds of a job, by side, or of the commands of the last one."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        if job in JOBS:
            here = (sys.executable, "-W", "ignore", "-m", "bench.training.five_jobs", "--job", job)
            sides = ("eager", "compiled")
            return {side: processor_s((*here, "--side", side), folder) for side in sides}
        (folder / "config.json").write_text(json.dumps(LLAMA_7B))
        cli = str(Path(sys.executable).with_name("cotrain-compile"))
        return {
            command.split()[0]: processor_s((cli, *command.split()), folder) for command in COMMANDS
        }


def main() -> None:
    """Measure all jobs, or be one of the processes that are measured."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("-o", "--output", type=Path)
    parser.add_argument("--job", choices=THEN)
    parser.add_argument("--side", choices=("eager", "compiled"))
    given = parser.parse_args()
    if given.side:
        JOBS[given.job](_eager if given.side == "eager" else _compiled)
        return
    result = {}
    for job in [given.job] if given.job else THEN:
        steps, then_s = THEN[job]
        now = measured(job)
        result[job] = {"then": {"steps": steps, "s": then_s}, "steps": NOW[job], "now": now}
        print(job, now, flush=True)
    if given.output:
        write_report(given.output, "What do a new user's first five jobs take?", result)


if __name__ == "__main__":
    main()

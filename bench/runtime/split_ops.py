"""What is it worth to run the loss in parts? A small model with the vocabulary of Llama 3.

Two layers, tied embedding of 128,256 words, on the emulated device, all in one process and in
turns: the step as it is, with its loss in parts by a plan, in chunks by hand as torchtune writes it
(a list of chunks, each with its own head and cross entropy), and as Liger does (an
`autograd.Function` that has the gradients in its forward, chunk by chunk). All are captured and
kept on the device, so that peaks are counted by one meter; plain eager beside them. For ours the
peak and the time that the plan predicts, with the times of ops as measured in the whole step, and
the least memory of the whole step and of that in parts.

    python -m bench.runtime.split_ops -o bench/results/split_ops.json
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import cotrain_compile
from bench.report import write_report
from bench.results_page.tables import markdown
from cotrain_compile.analysis.costs import measured_costs
from cotrain_compile.entry.tracing import trace
from cotrain_compile.files import save
from cotrain_compile.machine import MEMORIES, Tier
from cotrain_compile.placement.policies import resident
from cotrain_compile.placement.problem import Problem, formulate
from cotrain_compile.placement.schedule.schedule import schedule
from cotrain_compile.placement.search.infeasible import least_of
from cotrain_compile.plan import Plan, Timeline
from cotrain_compile.presets import find
from cotrain_compile.support.units import format_bytes, format_seconds

VOCABULARY, WIDTH, LAYERS, HEADS = 128_256, 32, 2, 4
SEQUENCES, TOKENS = 4, 128
CHUNKS = 8  # as torchtune has by default
PARTS = (8, 16, 32)
BUDGETS = dict.fromkeys(MEMORIES, 64 << 30)

Step = Callable[[Tensor, Tensor], Tensor]
Loss = Callable[[Tensor, Tensor, Tensor], Tensor]


class Block(nn.Module):
    """Attention and an MLP."""

    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList([nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)])
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        batch, tokens, width = x.shape
        qkv = self.qkv(self.norms[0](x)).view(batch, tokens, 3, HEADS, width // HEADS)
        q, k, v = (each.transpose(1, 2) for each in qkv.unbind(2))
        seen = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(seen.transpose(1, 2).reshape(batch, tokens, width))
        return x + self.down(F.gelu(self.up(self.norms[1](x))))  # type: ignore[no-any-return]


class Model(nn.Module):
    """What makes hidden states; the embedding is the head too."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.Sequential(*[Block() for _ in range(LAYERS)])
        self.norm = nn.LayerNorm(WIDTH)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.norm(self.blocks(self.embedding(tokens)))  # type: ignore[no-any-return]


def whole(hidden: Tensor, head: Tensor, targets: Tensor) -> Tensor:
    """The loss as everybody writes it first."""
    return F.cross_entropy((hidden @ head.t()).flatten(0, 1), targets.flatten())


def in_list(hidden: Tensor, head: Tensor, targets: Tensor) -> Tensor:
    """As torchtune: the logits of each chunk, and their cross entropies added up."""
    chunks = zip(hidden.chunk(CHUNKS, 1), targets.chunk(CHUNKS, 1), strict=True)
    losses = [
        F.cross_entropy((h @ head.t()).flatten(0, 1), t.flatten(), reduction="sum")
        for h, t in chunks
    ]
    return torch.stack(losses).sum() / targets.numel()


class Fused(torch.autograd.Function):
    """As Liger: the gradients of each chunk right behind its logits."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, head: Tensor, targets: Tensor) -> Tensor:
        losses, of_hidden, of_head = [], [], torch.zeros_like(head)
        count = targets.numel()
        for h, t in zip(hidden.chunk(CHUNKS), targets.chunk(CHUNKS), strict=True):
            likely = torch.log_softmax(h @ head.t(), -1)
            losses.append(F.nll_loss(likely, t, reduction="sum"))
            gradient = (likely.exp() - F.one_hot(t, likely.shape[-1])) / count
            of_hidden.append(gradient @ head)
            of_head = of_head + gradient.t() @ h
        ctx.save_for_backward(torch.cat(of_hidden), of_head)
        return torch.stack(losses).sum() / count

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        of_hidden, of_head = ctx.saved_tensors
        return of_hidden * gradients[0], of_head * gradients[0], None


def fused(hidden: Tensor, head: Tensor, targets: Tensor) -> Tensor:
    """The loss of `Fused`."""
    apply: Any = Fused.apply  # torch gives it no type
    loss: Tensor = apply(hidden.flatten(0, 1), head, targets.flatten())
    return loss


LOSSES: Mapping[str, Loss] = {"whole": whole, "chunks in a list": in_list, "fused by hand": fused}


def step_with(loss_of: Loss) -> Step:
    """A training step whose model makes hidden states for `loss_of`."""
    torch.manual_seed(0)
    model = Model()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)

    def step(tokens: Tensor, targets: Tensor) -> Tensor:
        loss = loss_of(model(tokens), model.embedding.weight, targets)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    return step


def batch() -> tuple[Tensor, Tensor]:
    """Tokens and targets."""
    torch.manual_seed(1)
    shape = SEQUENCES, TOKENS
    return torch.randint(0, VOCABULARY, shape), torch.randint(0, VOCABULARY, shape)


def compiled(loss_of: Loss, **options: Any) -> Step:
    """The same, captured for the emulated device."""
    settings = {"machine": "this-machine", "memory_budget": "64GiB", "host_memory_budget": "64GiB"}
    return torch.compile(
        step_with(loss_of),
        backend="cotrain",
        options={**settings, "poison": False, "quiet": True, "lowering": "eager", **options},
    )


def problem_of(loss_of: Loss) -> Problem:
    """The step to be planned."""
    dataflow = trace(lambda: (step_with(loss_of), batch()))
    return formulate(dataflow, find("this-machine"), BUDGETS)


def in_parts(problem: Problem, parts: int, folder: Path) -> Step:
    """The step that keeps all on the device, with its loss in so many parts."""
    placement = replace(resident(problem.dataflow), splits={"loss": parts})
    path = folder / f"{parts}.json"
    save(schedule(problem, placement), path)
    return compiled(whole, plan=str(path))


def _by_own_ops(parts: Problem, timelines: list[Timeline], plan: Plan) -> float:
    """Seconds of the step in parts, predicted from the times of its own ops."""
    profile = measured_costs(timelines, plan)
    known = formulate(parts.dataflow, parts.machine, BUDGETS, profile)
    return schedule(known, resident(parts.dataflow)).predicted.makespan_s


def table(result: Mapping[str, Any]) -> str:
    """A row for each way to write the loss."""
    rows = []
    for name, row in result["steps"].items():
        seconds = [row.get(key) for key in ("step_s", "predicted_s", "predicted_by_own_ops_s")]
        sizes = [row.get(key) for key in ("peak_bytes", "planned_bytes", "least_bytes")]
        rows.append(
            (
                name,
                format_seconds(row["processor_s"]),
                *("" if each is None else format_seconds(each) for each in seconds),
                *("" if size is None else format_bytes(size) for size in sizes),
            )
        )
    head = ("loss", "processor time", "step", "predicted", "by its own ops", "peak", "planned")
    return markdown((*head, "least memory"), rows)


def measure(repeats: int, folder: Path) -> dict[str, Any]:
    """By step: seconds and bytes, measured in turns and predicted."""
    problem = problem_of(whole)
    steps = {name: compiled(loss, policy="resident") for name, loss in LOSSES.items()}
    steps |= {f"in {parts} parts": in_parts(problem, parts, folder) for parts in PARTS}
    runs = {**steps, "eager": step_with(whole)}
    data = batch()
    losses = {name: float(run(*data).detach()) for name, run in runs.items()}
    seconds: dict[str, list[float]] = {name: [] for name in runs}
    timelines: dict[str, list[Any]] = {name: [] for name in steps}
    for _ in range(repeats):
        for name, run in runs.items():
            start = time.process_time()
            run(*data)
            seconds[name].append(time.process_time() - start)
            if name in steps:
                timelines[name].append(cotrain_compile.inspect(steps[name]).measured)
    of_whole = cotrain_compile.inspect(steps["whole"])
    profile = measured_costs(timelines["whole"], of_whole.plan)
    known = formulate(of_whole.problem.dataflow, problem.machine, BUDGETS, profile)
    whole_least = least_of(problem).nbytes
    found: dict[str, Any] = {}
    for name in runs:
        row = {"loss": losses[name], "processor_s": statistics.median(seconds[name])}
        if name in steps:
            own = cotrain_compile.inspect(steps[name])
            spans = [timeline.makespan_s for timeline in timelines[name]]
            row |= {
                "step_s": statistics.median(spans),
                "peak_bytes": timelines[name][-1].peak_bytes[Tier.DEVICE],
                "planned_bytes": own.plan.predicted.peak_bytes[Tier.DEVICE],
            }
            if splits := own.plan.placement.splits:
                row["predicted_s"] = schedule(known, own.plan.placement).predicted.makespan_s
                parts = problem.splitting(splits).as_its_own_step()
                row["predicted_by_own_ops_s"] = _by_own_ops(parts, timelines[name], own.plan)
                row["least_bytes"] = least_of(parts).nbytes
        found[name] = row
    found["whole"]["least_bytes"] = whole_least
    return found


def main() -> None:
    """Measure, print a table and write the report."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("-o", "--output", type=Path, required=True)
    parser.add_argument("--repeats", type=int, default=5)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        found = measure(arguments.repeats, Path(folder))
    result = {
        "vocabulary": VOCABULARY,
        "width": WIDTH,
        "layers": LAYERS,
        "tokens": SEQUENCES * TOKENS,
        "repeats": arguments.repeats,
        "steps": found,
    }
    print(table(result))
    question = "What does a loss in parts take, beside the whole and chunks by hand?"
    write_report(arguments.output, question, result)


if __name__ == "__main__":
    main()

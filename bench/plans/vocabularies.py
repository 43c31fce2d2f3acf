"""What parts of the loss bring to models with large vocabularies, simulated.

For each model the least device budget with a whole loss and in parts, and the step within what an
RTX 4090 has, with the option `split` "off" and "auto", plans checked. Nothing is run.

    python -m bench.plans.vocabularies -o bench/results/vocabularies.json --steps traced
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from bench.plans.stopwatch import stopwatch
from bench.report import write_report
from cotrain_compile import presets
from cotrain_compile.dataflow import Dataflow
from cotrain_compile.entry.tracing import trace
from cotrain_compile.errors import PlacementError
from cotrain_compile.files import load, save
from cotrain_compile.machine import Tier
from cotrain_compile.placement.check.check import check
from cotrain_compile.placement.problem import Problem, formulate
from cotrain_compile.placement.search.solve import SolveSettings, solve
from cotrain_compile.support.units import Size, format_bytes, format_seconds

MACHINE = "rtx4090"
HOST_BYTES = 256 << 30
BUDGET = "24GiB"

Job = tuple[Callable[..., Tensor], tuple[Any, ...]]


@dataclass(frozen=True)
class Row:
    """A model; steps are seconds, None where nothing fits."""

    model: str
    machine: str
    budget_bytes: int
    least_whole_bytes: int
    least_bytes: int
    whole_s: float | None
    step_s: float | None
    bound_s: float | None
    splits: dict[str, int]
    policy: str
    solve_s: float


def _causal(config: Any, build: Any, shape: tuple[int, int]) -> Job:
    """A step of AdamW with clipping, under bfloat16 autocast."""
    model = build(config)
    model.train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)

    def step(tokens: Tensor) -> Tensor:
        optimizer.zero_grad()
        with torch.autocast("cuda", torch.bfloat16):
            loss: Tensor = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        return loss

    return step, (torch.zeros(*shape, dtype=torch.int64),)


def llama_32_1b() -> Job:
    """Llama-3.2-1B, 4 x 4096 tokens."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=128_256,
        hidden_size=2048,
        intermediate_size=8192,
        num_hidden_layers=16,
        num_attention_heads=32,
        num_key_value_heads=8,
        max_position_embeddings=8192,
        tie_word_embeddings=True,
        use_cache=False,
    )
    return _causal(config, LlamaForCausalLM, (4, 4096))


def qwen_3b() -> Job:
    """Like Qwen2.5-3B, 4 x 2048 tokens."""
    from transformers import Qwen2Config, Qwen2ForCausalLM

    config = Qwen2Config(
        vocab_size=151_936,
        hidden_size=2048,
        intermediate_size=11_008,
        num_hidden_layers=36,
        num_attention_heads=16,
        num_key_value_heads=2,
        max_position_embeddings=8192,
        tie_word_embeddings=True,
        use_cache=False,
    )
    return _causal(config, Qwen2ForCausalLM, (4, 2048))


def gemma_2b() -> Job:
    """Like Gemma-2B, 4 x 2048 tokens."""
    from transformers import GemmaConfig, GemmaForCausalLM

    config = GemmaConfig(
        vocab_size=256_000,
        hidden_size=2048,
        intermediate_size=16_384,
        num_hidden_layers=18,
        num_attention_heads=8,
        num_key_value_heads=1,
        head_dim=256,
        max_position_embeddings=8192,
        use_cache=False,
    )
    return _causal(config, GemmaForCausalLM, (4, 2048))


MODELS: dict[str, Callable[[], Job]] = {
    "Llama-3.2-1B, 4 × 4096": llama_32_1b,
    "Qwen-like 3B, 4 × 2048": qwen_3b,
    "Gemma-like 2B, 4 × 2048": gemma_2b,
}


def step_of(name: str, folder: Path | None) -> Dataflow:
    """The traced step, read from `folder` where it is there."""
    path = folder / f"{MODELS[name].__name__}.json" if folder else None
    if path is not None and path.exists():
        return load(path, Dataflow)
    dataflow = trace(MODELS[name], machine=MACHINE)
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        save(dataflow, path)
    return dataflow


def least(problem: Problem, *, split: bool) -> int:
    """The least device budget, by what a refusal says."""
    try:
        solve(problem.with_budget(Tier.DEVICE, 0), SolveSettings(split=split))
    except PlacementError as refusal:
        return refusal.shortfall_bytes
    return 0


def row(name: str, dataflow: Dataflow, work_limit: float) -> Row:
    """What one model takes, with a whole loss and in parts."""
    machine = presets.find(MACHINE)
    budget = Size.parse(BUDGET).of(machine.device.capacity_bytes)
    problem = formulate(dataflow, machine, {Tier.DEVICE: budget, Tier.HOST: HOST_BYTES})
    try:
        whole = solve(problem, SolveSettings(split=False, work_limit=work_limit))
        check(problem, whole)
        whole_s: float | None = whole.predicted.makespan_s
    except PlacementError:
        whole_s = None
    with stopwatch() as watch:
        try:
            plan = solve(problem, SolveSettings(work_limit=work_limit))
        except PlacementError:
            plan = None
    if plan is not None:
        check(problem, plan)
    return Row(
        name,
        MACHINE,
        budget,
        least(problem, split=False),
        least(problem, split=True),
        whole_s,
        plan.predicted.makespan_s if plan else None,
        plan.report.lower_bound_s if plan and plan.report else None,
        dict(plan.placement.splits) if plan else {},
        plan.placement.policy if plan else "",
        watch.wall_s,
    )


def table(result: Mapping[str, Any]) -> str:
    """For the page of results."""
    lines = [
        "| step | parts | least memory, whole | in parts | step, whole | in parts | above bound |",
        "| --- " + "| ---: " * 6 + "|",
    ]
    for found in (Row(**row) for row in result["rows"]):
        parts = ", ".join(f"{name} {n}" for name, n in sorted(found.splits.items())) or "-"
        cells = [
            found.model,
            parts,
            format_bytes(found.least_whole_bytes),
            format_bytes(found.least_bytes),
            format_seconds(found.whole_s) if found.whole_s else "does not fit",
            format_seconds(found.step_s) if found.step_s else "does not fit",
            f"{100 * (found.step_s / found.bound_s - 1):.1f} %"
            if found.step_s and found.bound_s
            else "-",
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def rows(only: str, folder: Path | None, work_limit: float) -> Iterator[Row]:
    """A row for each model with `only` in its name."""
    for name in MODELS:
        if only in name:
            found = row(name, step_of(name, folder), work_limit)
            step, whole = (format_seconds(s) if s else "-" for s in (found.step_s, found.whole_s))
            print(
                f"{name}: least {format_bytes(found.least_whole_bytes)} -> "
                f"{format_bytes(found.least_bytes)}, step {whole} -> {step} {found.splits}"
            )
            yield found


def main() -> None:
    """Write the report that the command asks for."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("-o", "--output", type=Path, required=True)
    parser.add_argument("--steps", type=Path, help="a folder that keeps traced steps")
    parser.add_argument("--only", default="", help="models with these words in their names")
    parser.add_argument("--work-limit", type=float, default=SolveSettings.work_limit)
    given = parser.parse_args()
    found = [asdict(each) for each in rows(given.only, given.steps, given.work_limit)]
    write_report(given.output, "what parts of the loss bring", {"rows": found})


if __name__ == "__main__":
    main()

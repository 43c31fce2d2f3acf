"""What does a step of several cards take? Simulated steps and peaks of one rank, by who keeps what.

Llama steps of 8 (or 2) ranks, traced by one process, on servers of several cards. Replicated as by
`DistributedDataParallel`; sharded with parameters gathered once (as ZeRO-2 keeps them) and again
for the backward (ZeRO-3); sharded with the rule of ZeRO-Offload; and our plan, with the bound that
no plan beats. Where the device is too small, what it would take is in brackets. Nothing is run.

A row is a model on a server; rows that the output has already are left alone, so that `--rows 1`
adds the next one.

    python -m bench.plans.several_cards -o bench/results/several_cards.json
    python -m bench.plans.several_cards -o several_cards.json --rows 1 --model "Llama 7B"
"""

from __future__ import annotations

import argparse
import importlib
import json
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel

import cotrain_compile
from bench.report import write_report
from cotrain_compile import presets
from cotrain_compile.dataflow import Dataflow
from cotrain_compile.entry.tracing import trace
from cotrain_compile.errors import PlacementError
from cotrain_compile.machine import Tier
from cotrain_compile.placement.check.check import check
from cotrain_compile.placement.policies import resident, zero_offload
from cotrain_compile.placement.problem import Problem, formulate
from cotrain_compile.placement.recompute.levels import gathered
from cotrain_compile.placement.schedule.schedule import schedule
from cotrain_compile.placement.search.solve import SolveSettings, solve
from cotrain_compile.plan import Placement, Plan
from cotrain_compile.support.units import format_bytes, format_seconds

EXAMPLES = Path("docs/examples")
SERVERS = ("8xrtx4090", "8xa100", "8xh100", "2xgh200")
MOST_RANKS = max(presets.RANKS[server] for server in SERVERS)
PLENTY = 1 << 50
TERABYTE = 1 << 40


@dataclass(frozen=True)
class Model:
    """A Llama shape of `docs/examples/llama.py`, with the batch of one rank."""

    name: str
    shape: str
    batch: int


MODELS = (
    Model("Llama 7B", "LLAMA_7B", 1),
    Model("Llama 13B", "LLAMA_13B", 1),
    Model("Llama 70B", "LLAMA_70B", 1),
)
WAYS = ("replicated", "gathered once", "gathered again", "ZeRO-Offload", "ours")


@dataclass(frozen=True)
class Found:
    """One way to train: seconds of a step, bytes at the peak, whether the device has them."""

    step_s: float
    peak_bytes: int
    fits: bool
    policy: str = ""


@dataclass(frozen=True)
class Row:
    """A model on a server; a way without a plan is not in `ways`."""

    model: str
    server: str
    ranks: int
    batch: int
    ways: Mapping[str, Found]
    bound_s: float
    network_s: float
    seconds: float


def job(model: Model, wrap: Callable[[Any], Any]) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """The step that an example has for one card, of a wrapped model."""
    from transformers import LlamaForCausalLM

    module = _example("llama")
    made = LlamaForCausalLM(getattr(module, model.shape))
    step: tuple[Callable[..., Any], tuple[Any, ...]] = _example("training").training_step(
        wrap(made), batch=model.batch, length=2048
    )
    return step


def replicated(model: Any) -> Any:
    """`model`, whole on every rank."""
    wrapped = DistributedDataParallel(model)
    wrapped.config = model.config
    return wrapped


def sharded(model: Any) -> Any:
    """`model` with FSDP2, layer by layer, gathered and reduced in bfloat16."""
    policy = MixedPrecisionPolicy(torch.bfloat16, reduce_dtype=torch.bfloat16)
    for layer in model.model.layers:
        fully_shard(layer, mp_policy=policy)
    return fully_shard(model, mp_policy=policy)


def _example(name: str) -> Any:
    """A module of the examples, which import one another by name."""
    folder = str(EXAMPLES.resolve())
    if folder not in sys.path:
        sys.path.insert(0, folder)
    return importlib.import_module(name)


def step_of(model: Model, ranks: int, way: str, folder: Path | None) -> Dataflow:
    """The traced step of one of `ranks`, "replicated" or "sharded"; kept in `folder`.

    A replicated step has the same ops for any number of ranks, and is traced for one number.
    """
    traced = MOST_RANKS if way == "replicated" else ranks
    kept = folder / f"{model.shape.lower()}_{traced}_{way}.json" if folder else None
    if kept is not None and kept.exists():
        return _of_ranks(cotrain_compile.files.load(kept, Dataflow), ranks)
    wrap = replicated if way == "replicated" else sharded
    dataflow = trace(partial(job, model, wrap), ranks=traced, device="cuda")
    if kept is not None:
        kept.parent.mkdir(parents=True, exist_ok=True)
        cotrain_compile.files.save(dataflow, kept)
    return _of_ranks(dataflow, ranks)


def _of_ranks(dataflow: Dataflow, ranks: int) -> Dataflow:
    """The step with its exchanges between so many ranks."""
    if dataflow.ranks == ranks:
        return dataflow
    ops = (
        replace(op, collective=replace(op.collective, ranks=ranks)) if op.collective else op
        for op in dataflow.ops
    )
    return replace(dataflow, ops=tuple(ops), ranks=ranks)


def row(model: Model, server: str, settings: SolveSettings, folder: Path | None) -> Row:
    """All ways to train `model` on `server`. Every plan that fits is checked."""
    began = time.perf_counter()
    ranks, machine = presets.RANKS[server], presets.find(server)
    budgets = {Tier.DEVICE: machine.device.capacity_bytes, Tier.HOST: TERABYTE}
    whole, parts = (
        formulate(step_of(model, ranks, way, folder), machine, budgets)
        for way in ("replicated", "sharded")
    )
    once = resident(parts.dataflow)
    again = replace(once, recomputed=tuple(gathered(parts.dataflow)))
    ways = {
        "replicated": _kept(whole, resident(whole.dataflow)),
        "gathered once": _kept(parts, once),
        "gathered again": _kept(parts, again),
        "ZeRO-Offload": _kept(parts, zero_offload(parts.dataflow)),
    }
    bound_s = 0.0
    try:
        plan = solve(parts, settings)
        check(parts, plan)
        ways["ours"] = _found(plan, budgets[Tier.DEVICE])
        bound_s = plan.report.lower_bound_s if plan.report else 0.0
    except PlacementError as error:
        print(f"{model.name} on {server}: {error}")
    network_s = sum(parts.costs.network_s.values())
    seconds = time.perf_counter() - began
    return Row(model.name, server, ranks, model.batch, ways, bound_s, network_s, seconds)


def _kept(problem: Problem, placement: Placement) -> Found:
    """That placement, on a device with room for it."""
    plan = schedule(problem.with_budget(Tier.DEVICE, PLENTY), placement)
    return _found(plan, problem.budgets[Tier.DEVICE])


def _found(plan: Plan, budget_bytes: int) -> Found:
    peak = plan.predicted.peak_bytes[Tier.DEVICE]
    return Found(plan.predicted.makespan_s, peak, peak <= budget_bytes, plan.placement.policy)


def table(result: Mapping[str, Any]) -> str:
    """For the page of results."""
    lines = [
        f"| model, server | {' | '.join(WAYS)} | bound |",
        "|---" * (len(WAYS) + 2) + "|",
    ]
    for each in result["rows"]:
        cells = [_cell(each["ways"].get(way)) for way in WAYS]
        bound = format_seconds(each["bound_s"]) if each["bound_s"] else "-"
        lines.append(f"| {each['model']}, {each['server']} | {' | '.join(cells)} | {bound} |")
    told = (
        "In brackets: what the card has no room for. All ways overlap exchanges with the device as "
        "our schedule does; the host has room for 1 TiB a rank. No plan that fits beats the bound."
    )
    return "\n".join([*lines, "", told, ""])


def _cell(found: Mapping[str, Any] | None) -> str:
    if found is None:
        return "none"
    told = f"{format_seconds(found['step_s'])}, {format_bytes(found['peak_bytes'])}"
    return told if found["fits"] else f"({told})"


def main(arguments: Sequence[str] | None = None) -> None:
    """Add rows that are missing to the output, and print the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("-o", "--output", type=Path, required=True)
    parser.add_argument("--rows", type=int, default=len(MODELS) * len(SERVERS), help="at most")
    parser.add_argument("--model", action="append", help="as the table has it")
    parser.add_argument("--server", action="append")
    parser.add_argument("--steps", type=Path, help="folder for traced steps")
    parser.add_argument("--work-limit", type=float, default=SolveSettings.work_limit)
    given = parser.parse_args(arguments)
    rows = json.loads(given.output.read_text())["result"]["rows"] if given.output.exists() else []
    known = {(each["model"], each["server"]) for each in rows}
    left = [
        (model, server)
        for model in MODELS
        for server in (given.server or SERVERS)
        if model.name in (given.model or [m.name for m in MODELS])
        and (model.name, server) not in known
    ]
    settings = SolveSettings(work_limit=given.work_limit)
    for model, server in left[: given.rows]:
        rows.append(asdict(row(model, server, settings, given.steps)))
        write_report(given.output, (__doc__ or "").splitlines()[0], {"rows": rows})
    print(table({"rows": rows}))


if __name__ == "__main__":
    torch.manual_seed(0)
    main()

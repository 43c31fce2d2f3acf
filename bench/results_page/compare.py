"""Where do we stand? All benchmarks in one page, from the JSONs of `bench/results`.

Prints the page; `--write` also writes `docs/results.md` and puts the figures of the JSONs into the
sentences of the other pages that quote them (`bench/results_page/pages.py` and `readme.py`).
Measures nothing: each section names the command that makes its JSON again.

    python -m bench.results_page.compare
    python -m bench.results_page.compare --write
"""

from __future__ import annotations

import argparse
import importlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markdown import Markdown

from bench.results_page import compiler_tables, tables
from bench.results_page.figures import FIGURES, refreshed

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "bench" / "results"
PAGE = ROOT / "docs" / "results.md"

HEAD = """# Measured

What each benchmark found, in the few figures that carry a claim; a test holds them to the JSONs,
which have every row, the command, the hardware and the versions. Measured on a GPU is only
[Steps on a card](#steps-on-a-card): other figures for cards are *simulated*, and those called
measured are of an *emulated* device, host memory with throttled links. Simulated figures of
2026-11-25 and before have one rate for every kind of op
([decision 59](decisions/0059-seconds-by-kind.md)), and a `zero-offload` of 10.8 bytes a
parameter, not 4, which is too slow.
"""

Table = Callable[[Mapping[str, Any]], str]


def own_table(name: str) -> Table:
    """The function `table` of benchmark `name`, looked up when there is something to show."""
    return lambda result: str(importlib.import_module(f"bench.{name}").table(result))


@dataclass(frozen=True)
class Section:
    """A part of the page: the JSONs whose names match `pattern`, drawn by `table`."""

    title: str
    pattern: str
    table: Table


SECTIONS = (
    Section("Published steps", "published_steps", own_table("published.table")),
    Section("Rivals as published", "rivals", own_table("published.rivals")),
    Section("Plans against simple rules", "plans", own_table("plans.plans")),
    Section("Plans against their bound", "placement", tables.placement),
    Section("Plans in little more than the least memory", "tight", tables.tight),
    Section("Plans of steps that nobody tuned for", "campaign", tables.campaign),
    Section("Recomputation", "recompute", tables.recompute),
    Section("Updates on the host against peers", "host_update_peers", tables.host_update_peers),
    Section("Updates on the host in a step", "host_update", tables.host_update),
    Section(
        "Updates on the host, op by op", "host_update_parts", compiler_tables.host_update_parts
    ),
    Section("Predicted against measured", "simulated_vs_measured", tables.simulated_vs_measured),
    Section("Steps on this processor", "processor_steps", tables.processor_steps),
    Section(
        "Steps that recompute, predicted against measured",
        "recompute_measured",
        tables.emulated,
    ),
    Section(
        "Early updates against ZeRO-Offload's",
        "coarse_against_zero_offload",
        tables.coarse_against_zero_offload,
    ),
    Section("Large parameters in chunks", "pieces", tables.pieces),
    Section("States on disk", "disk", tables.disk),
    Section("The loss in parts", "split_ops", tables.split_ops),
    Section("With parts and without", "parts", own_table("plans.parts")),
    Section("Large vocabularies", "vocabularies", own_table("plans.vocabularies")),
    Section("Overlapping steps", "overlap", tables.overlap),
    Section("Updates before the norm is known", "speculation", tables.speculation),
    Section("Micro-batches by layer", "micro_batches", tables.emulated),
    Section("Servers of several cards", "several_cards", tables.several_cards),
    Section("Six clusters", "six_clusters", tables.six_clusters),
    Section("Megatron's table", "megatron", tables.megatron),
    Section("FSDP and Alpa", "published_layouts", own_table("cluster.others")),
    Section(
        "Plans of a cluster, predicted against measured",
        "cluster_runs",
        tables.emulated,
    ),
    Section("Rows of an answer on four ranks", "row_runs", own_table("runtime.row_runs")),
    Section("Two ranks beside peers", "several_ranks", tables.several_ranks),
    Section("Small exchanges in buckets", "buckets", tables.buckets),
    Section(
        "Against torch.compile", "against_torch_compile*", compiler_tables.against_torch_compile
    ),
    Section("The first step", "compile_seconds", compiler_tables.compile_seconds),
    Section("Five jobs of a new user", "five_jobs", compiler_tables.five_jobs),
    Section("What a layer more costs", "first_step", compiler_tables.first_step),
    Section("What a placed step costs", "overhead", compiler_tables.overhead),
    Section("What a task costs on a card", "issue_cost", compiler_tables.issue_cost),
    Section("Many small updates on the host", "small_updates", compiler_tables.small_updates),
    Section("Small steps against torch.compile", "small_step", compiler_tables.small_step),
    Section("Steps on a card", "gpu_steps", own_table("gpu.steps_table")),
    Section("Kernels of steps on a card", "gpu_kernels", own_table("gpu.kernels")),
    Section("On a card", "gpu_suite", tables.gpu_suite),
    Section("For a card, without one", "fake_cuda_matrix", compiler_tables.fake_cuda_matrix),
    Section("A 7B step without a card", "large_step", compiler_tables.large_step),
    Section("Growth", "growth", compiler_tables.growth),
    Section("The report of a plan", "report_page", compiler_tables.report_page),
    Section("A long run", "long_run", tables.long_run),
    Section("Losses", "loss_curves", tables.loss_curves),
    Section("Loops that are captured", "matrix", tables.matrix),
)

# Campaigns and the soak are on a page of their own, by `bench.reliability.page`; the first screen
# is the table of the README.
ELSEWHERE = ("reliability_*", "long_tests*", "soak", "first_screen*")


def page() -> str:
    """The results page as Markdown. Sections without a JSON are left out."""
    parts = [HEAD]
    for section in SECTIONS:
        paths = sorted(RESULTS.glob(f"{section.pattern}.json"))
        if not paths:
            continue
        documents = [json.loads(path.read_text()) for path in paths]
        merged = {key: value for d in documents for key, value in d["result"].items()}
        files = ", ".join(map(_origin, paths, documents))
        parts.append(f"## {section.title}\n\n{section.table(merged)}\n<sub>{files}</sub>\n")
    return "\n".join(parts)


def _origin(path: Path, document: Mapping[str, Any]) -> str:
    """Where the figures come from: the file, and its day."""
    return f"[{path.name}](../bench/results/{path.name}) of {document['date']}"


def main(arguments: Sequence[str] | None = None) -> None:
    """Print the page; with `--write`, write it and the figures in other pages."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--write", action="store_true", help="docs/results.md and figures in pages")
    given = parser.parse_args(arguments)
    text = page()
    Console().print(Markdown(text))
    if not given.write:
        return
    PAGE.write_text(text, encoding="utf-8")
    for name in sorted({figure.page for figure in FIGURES}):
        path = ROOT / name
        path.write_text(refreshed(path.read_text(encoding="utf-8"), name), encoding="utf-8")


if __name__ == "__main__":
    main()

"""Published throughput of FSDP and of Alpa on GPT of 175 billion parameters, beside ours.

FSDP (Zhao et al., VLDB 2023, section 5.4): all parameters sharded over 128 to 512 A100 of 80 GB in
machines of eight with a network of 2 Tb/s, sequences of 2048 tokens, a vocabulary of 50,000, layers
run again; 173 and 186 Tflop/s a card with one and two samples each, at all sizes. Its T5 is in
figures alone. Alpa (with Ray, 2023): OPT-175B on 1,024 A100, up to 179 Tflop/s; neither its layout
nor its samples a step are printed: 1,024 are taken, and the fastest layout of ours. Figures of the
OSDI 2022 paper are drawn, on V100, and not printed.

Layers are by formula (`bench.cluster.gpt`), Tflop/s counted as in `bench.cluster.megatron`, with
layers that run again whether ours do or not; nothing is fitted.

    python -m bench.cluster.others -o bench/results/published_layouts.json
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from bench.cluster.gpt import Shape, gpt
from bench.report import write_report
from bench.results_page.tables import markdown
from cotrain_compile.cluster.composed.mesh import Mesh, MeshLinks, RankLayers
from cotrain_compile.cluster.composed.search import KINDS, ComposedPlan, plan_composed
from cotrain_compile.cluster.model.layout import Layout
from cotrain_compile.cluster.sources.cluster_presets import find_cluster
from cotrain_compile.cluster.steps.fastest import fastest_option
from cotrain_compile.errors import CotrainError
from cotrain_compile.presets import find

GPT_175B = Shape(hidden=12288, layers=96, heads=96, vocabulary=50000)


@dataclass(frozen=True)
class Published:
    """Devices, samples a step and Tflop/s a card; whether its layout is printed: all sharded."""

    system: str
    devices: int
    samples: int
    tflops: float
    sharded: bool = True


TABLE = (
    Published("FSDP", 128, 128, 173),
    Published("FSDP", 128, 256, 186),
    Published("FSDP", 512, 512, 173),
    Published("FSDP", 512, 1024, 186),
    Published("Alpa", 1024, 1024, 179, sharded=False),
)


def measure(row: Published) -> dict[str, Any]:
    """A row beside ours."""
    profile = gpt("GPT 175 B", GPT_175B, find("a100-80"))
    cluster = find_cluster(f"2x8xa100 machines={row.devices // 8}")
    began = time.process_time()
    if row.sharded:
        layout = Layout(shard=row.devices)
        mesh = Mesh(layout, MeshLinks(cluster), RankLayers(profile), row.samples)
        each = row.samples // row.devices
        options = [
            option
            for option in mesh.options()
            if option.layout.recompute and option.layout.micro_batch == each
        ]
        found = fastest_option(options)
        plan = ComposedPlan(mesh, options[found[0]].layout, found[1]) if found else None
    else:
        plans = []
        for kind in KINDS:
            try:
                plans.append(plan_composed(profile, cluster, row.samples, kind))
            except CotrainError:
                continue
        plan = min(plans, key=lambda plan: plan.step.seconds, default=None)
    seconds = plan.step.seconds if plan else None
    return asdict(row) | {
        "layout": str(plan.layout) if plan else "",
        "step_s": seconds,
        "tflops_ours": GPT_175B.step_flops(row.samples) / seconds / row.devices / 1e12
        if seconds
        else None,
        "solve_s": time.process_time() - began,
    }


def table(result: Mapping[str, Any]) -> str:
    """For the page of results."""
    rows = [
        (
            f"{row['system']}, {row['devices']} A100, {row['samples']} samples",
            row["layout"],
            f"{row['tflops']:.0f}",
            f"{row['tflops_ours']:.0f}" if row["tflops_ours"] else "-",
            f"{row['tflops_ours'] / row['tflops']:.2f} ×" if row["tflops_ours"] else "-",
        )
        for row in result["rows"]
    ]
    headings = ("GPT of 175 B", "layout", "published Tflop/s", "ours", "ours / published")
    return markdown(headings, rows)


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure all rows, and print the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("-o", "--output", type=Path, required=True)
    given = parser.parse_args(arguments)
    rows = [measure(row) for row in TABLE]
    write_report(given.output, (__doc__ or "").splitlines()[0], {"rows": rows})
    print(table({"rows": rows}))


if __name__ == "__main__":
    main()

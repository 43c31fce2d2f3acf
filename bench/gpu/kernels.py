"""Of which kernels is what is predicted of a card too short? Seconds by kind, of compiled steps.

    python -m bench.gpu.kernels -o bench/results/gpu_kernels.json     no GPU needed, but timm

Measured is what `bench.gpu.steps` has profiled on an H200; predicted by the preset, and by the
calibration that was made there before. Steps are traced here with few layers and grow by what one
more adds (`bench.published.steps`).

Of one Llama the kernels of the compiled step as it comes are compared, since those of the placed
one were timed beside another process. Its attention reads a mask when it is compiled, and that of
the trace is causal: it is counted as what it is on the card.
"""

from __future__ import annotations

import argparse
import json
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from bench.published.features import KERNELS, of_all_layers
from bench.published.steps import traced_of
from bench.report import write_report
from bench.results_page.tables import markdown
from cotrain_compile import files, presets
from cotrain_compile.analysis.costs import roofline
from cotrain_compile.dataflow import Dataflow, Op
from cotrain_compile.machine import Machine
from cotrain_compile.machine.op_classes import OpKind

MEASURED = Path("bench/results/gpu_steps.json")
_MASKED = {
    OpKind.ATTENTION: OpKind.MASKED_ATTENTION,
    OpKind.ATTENTION_BACKWARD: OpKind.MASKED_ATTENTION_BACKWARD,
}
# By step: which way was profiled alone, and the published row that is traced like it.
STEPS: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    "GPT-2 124M, 12 × 1024": ("resident", {"id": "own-gpt2", "batch": 12, "note": ""}),
    "Llama 1.1B bfloat16, 4 × 2048": ("torch.compile", {"id": "own-llama", "batch": 4}),
    "Llama 1.1B in checkpoints, 8 × 2048": (
        "torch.compile",
        {"id": "own-llama", "batch": 8, "checkpointing": True},
    ),
    "ResNet-50 channels last, 128": (
        "resident",
        {"id": "own-resnet50", "batch": 128, "model": "resnet50", "precision": "channels_last"},
    ),
    "ViT-B/16, 64": ("resident", {"id": "own-vit", "batch": 64, "model": "vit_base_patch16_224"}),
}
_ROW = {"kind": "step", "sequence_or_size": 2048, "checkpointing": False}
_NAMES = {"product": "products", "convolution": "products"}


def main() -> None:
    """Predict each step's kernels and write them beside what was measured."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("-o", "--output", type=Path, required=True)
    given = parser.parse_args()
    measured = json.loads(MEASURED.read_text())["result"]
    machines = {
        "preset": presets.find("h200"),
        "calibrated": files.from_json(json.dumps(measured["machine"]), Machine),
    }
    rows = [row for step in STEPS for row in _rows(step, measured["rows"], machines)]
    write_report(given.output, (__doc__ or "").splitlines()[0], {"rows": rows})


def _rows(
    step: str, measured: list[dict[str, Any]], machines: Mapping[str, Machine]
) -> list[dict[str, Any]]:
    way, row = STEPS[step]
    found = next(r for r in measured if (r["step"], r["way"]) == (step, way))
    traced = traced_of({**_ROW, **row})
    assert traced is not None
    flows = [_with_masks(s) if "Llama" in step else s for s in traced.steps(presets.find("h200"))]
    seconds = {"measured": _by_kind(found["kernels"])}
    for name, machine in machines.items():
        seconds[name] = of_all_layers(traced, [_predicted(flow, machine) for flow in flows])
    kinds = [kind for kind in _KINDS if kind in seconds["measured"]]
    rows: list[dict[str, Any]] = [
        {"kind": kind, **{n: s[kind] for n, s in seconds.items()}} for kind in kinds
    ]
    rows.append({"kind": "all", **{n: sum(s.values()) for n, s in seconds.items()}})
    return [{"step": step, "way": way, **row} for row in rows]


def _by_kind(kernels: Mapping[str, float]) -> dict[str, float]:
    found: defaultdict[str, float] = defaultdict(float)
    for kind, seconds in kernels.items():
        if not kind.startswith("kernel "):
            found[_NAMES.get(kind, kind)] += seconds
    return dict(found)


def _predicted(step: Dataflow, machine: Machine) -> dict[str, float]:
    costs = roofline(step, machine, compiled=True).device_s
    found: defaultdict[str, float] = defaultdict(float)
    for op in step.ops:
        found[_kind(op)] += costs[op.name]
    return found


def _kind(op: Op) -> str:
    told = (kind for kind, classes in KERNELS.items() if op.flops and op.kind in classes)
    kind = next(told, "memory")
    return _NAMES.get(kind, kind)


def _with_masks(step: Dataflow) -> Dataflow:
    ops = (
        replace(op, kind=_MASKED[op.kind], flops=2 * op.flops) if op.kind in _MASKED else op
        for op in step.ops
    )
    return replace(step, ops=tuple(ops))


def table(result: Mapping[str, Any]) -> str:
    """How far off, by kind: by the preset, and behind the stroke as calibrated."""
    rows = {(row["step"], row["kind"]): row for row in result["rows"]}
    return f"{_INTRODUCTION}\n\n" + markdown(
        ("step", "measured", *_KINDS, "all"),
        [
            (
                step,
                f"{1e3 * rows[step, 'all']['measured']:.1f} ms",
                *(_off(rows.get((step, kind))) for kind in (*_KINDS, "all")),
            )
            for step in dict.fromkeys(step for step, _ in rows)
        ],
    )


def _off(row: Mapping[str, Any] | None) -> str:
    if row is None:
        return "-"
    found = (row[name] / row["measured"] - 1 for name in ("preset", "calibrated"))
    return " / ".join(f"{100 * off:+.0f} %" for off in found)


_KINDS = ("products", "attention", "memory")
_INTRODUCTION = """Kernels of compiled steps on the H200, whose seconds no busy host changes: how
far off the preset is / a calibration, which did not know masks yet. Convolutions are among
products."""


if __name__ == "__main__":
    main()

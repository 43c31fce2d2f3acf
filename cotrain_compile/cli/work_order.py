"""Work order: under which heading of the help a command stands, and how it is called."""

from __future__ import annotations

from collections.abc import Mapping

PLAN, LOOK, MACHINE, TRY = "Plan", "Look at what was saved", "Machines", "Try it"

# Commands in the order in which somebody comes to need them, each with its heading.
PANELS: Mapping[str, str] = {
    "from-config": PLAN,
    "trace": PLAN,
    "analyze": PLAN,
    "solve": PLAN,
    "sweep": PLAN,
    "cluster": PLAN,
    "options": PLAN,
    "show": LOOK,
    "explain": LOOK,
    "diff": LOOK,
    "graph": LOOK,
    "doctor": MACHINE,
    "machines": MACHINE,
    "calibrate": MACHINE,
    "demo": TRY,
}

EXAMPLES: Mapping[str, tuple[str, ...]] = {
    "from-config": (
        "from-config ds_config.json",
        "from-config recipe.yaml --step step.json --machine rtx4090",
    ),
    "trace": (
        "trace job.py:step -o step.json",
        "trace job.py:step --machine rtx4090 --dynamic -o step.json",
        "trace llama/config.json --optimizer adamw --batch 4 --length 2048 -o step.json",
    ),
    "analyze": ("analyze step.json --machine rtx4090 --memory-budget 20GiB",),
    "solve": (
        "solve step.json --machine rtx4090 --memory-budget 20GiB -o plan.json",
        "solve step.json --memory-budget 16GiB --memory-budget 20GiB -o plan.json",
    ),
    "sweep": ("sweep step.json --machine rtx4090 --machine h100 -o sweep",),
    "cluster": (
        "cluster step.json --cluster 8xh100 --samples 64 -o cluster-plan.json",
        "cluster profile.json --cluster cluster.json --samples 64 --json",
    ),
    "options": ("options", "options --json > options.schema.json"),
    "show": (
        "show plan.json --html report.html",
        "show plan.json --timeline timeline.png --perfetto trace.json",
    ),
    "explain": ("explain plan.json layers.17.mlp.weight",),
    "diff": ("diff before.json after.json",),
    "graph": ("graph step.json --plan plan.json -o step.svg",),
    "doctor": ("doctor", "doctor --json"),
    "machines": ("machines", "machines rtx4090"),
    "calibrate": ("calibrate -o machine.json --device cuda",),
    "demo": ("demo", "demo --steps 60 --budget 48MiB"),
}


def epilog(command: str) -> str:
    """The examples of `command`; an empty line is what keeps two of them apart."""
    calls = [f"cotrain-compile {call}" for call in EXAMPLES[command]]
    return "\n\n".join(["Examples:" if len(calls) > 1 else "Example:", *calls])

"""Do 50 steps of a real training give the same losses in eager, captured, and with Inductor?

The demo's model learns Python's standard library, with clipping and AdamW. Every run starts from
the same seed. Writes the losses and their largest differences, and draws them.

python -m bench.training.loss_curves -o bench/results/loss_curves.json \\
    --picture loss-curves.png
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import matplotlib as mpl
import torch
from matplotlib import pyplot as plt
from rich.console import Console

from bench.report import write_report
from cotrain_compile.demo.job import (
    Shape,
    compiled,
    new_job,
    standard_library,
    train,
    training_step,
)

STEPS, ROWS, SEED = 50, 8, 0
SHAPE = Shape(layers=4, width=128, heads=4)
RUNS: dict[str, dict[str, Any] | None] = {
    "eager": None,
    "captured": {"policy": "resident", "lowering": "eager"},
    "captured, values made again": {"policy": "resident", "lowering": "eager", "remat": True},
    "inductor": {"policy": "resident", "lowering": "inductor"},
    "inductor, updates on the host": {"policy": "coarse", "lowering": "inductor"},
}


def losses_of(options: dict[str, Any] | None) -> list[float]:
    """The loss of each step, from the same start."""
    torch._dynamo.reset()
    job = new_job(standard_library(), shape=SHAPE, rows=ROWS, seed=SEED)
    step = training_step(job)
    if options is not None:
        step = compiled(step, options)
    return [result.loss for result in train(job, step, 0, STEPS)]


def draw(losses: dict[str, list[float]], path: Path) -> None:
    """Losses above, their relative differences from eager below."""
    mpl.use("Agg")
    figure, (above, below) = plt.subplots(2, 1, figsize=(8, 6), sharex=True, layout="constrained")
    steps = range(1, STEPS + 1)
    for number, (name, values) in enumerate(losses.items()):
        # Lines lie on each other: each later one is thinner.
        above.plot(steps, values, label=name, linewidth=7 - 1.4 * number, alpha=0.8)
        if name != "eager":
            below.plot(steps, relative(values, losses["eager"]), label=name, color=f"C{number}")
    above.set_ylabel("loss")
    above.legend()
    below.set_yscale("symlog", linthresh=1e-8)
    below.set(ylabel="relative difference from eager", xlabel="step")
    figure.savefig(path, dpi=110)


def relative(values: list[float], reference: list[float]) -> list[float]:
    """How far each value is from its reference, as a part of it."""
    return [abs(a - b) / abs(b) for a, b in zip(values, reference, strict=True)]


def main() -> None:
    """Train, print the largest differences, write the report and the picture."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("-o", "--output", type=Path, required=True)
    parser.add_argument("--picture", type=Path, required=True)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    losses = {name: losses_of(options) for name, options in RUNS.items()}
    differences = {name: max(relative(v, losses["eager"])) for name, v in losses.items()}
    Console().print(differences)
    result = {"largest_relative_difference": differences, "losses": losses}
    write_report(arguments.output, __doc__.splitlines()[0], result)
    draw(losses, arguments.picture)


if __name__ == "__main__":
    main()

"""Is a small step, all of it resident, slower under this package than under stock torch.compile?

An MLP of 2 to 4 linear layers and a batch of 8: what a call takes is Python. Stock is the model
with its loss compiled, and `optimizer.step`. Both train in one process and on one thread, in turns,
call by call; processor time of the calling thread, which other programs disturb least.

python -m bench.compiler.small_step -o bench/results/small_step.json
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

from bench.report import write_report

Step = Callable[[Tensor, Tensor], Tensor]
LAYERS, WIDTH, BATCH, CLASSES = (2, 3, 4), 64, 8, 10
WARM_UP, CALLS = 10, 1000
OURS = {"policy": "resident", "lowering": "inductor", "poison": False}


def mlp(layers: int) -> nn.Sequential:
    """`layers` linear layers with ReLU between them; the same numbers each time."""
    torch.manual_seed(0)
    hidden = [m for _ in range(layers - 1) for m in (nn.Linear(WIDTH, WIDTH), nn.ReLU())]
    return nn.Sequential(*hidden, nn.Linear(WIDTH, CLASSES))


def ours(layers: int) -> Step:
    """The whole step compiled by this package."""
    model = mlp(layers)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    def step(inputs: Tensor, targets: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(inputs), targets)
        loss.backward()
        optimizer.step()
        return loss

    compiled: Step = torch.compile(step, backend="cotrain", options=OURS)
    return compiled


def stock(layers: int) -> Step:
    """Loss and optimizer, each compiled by torch."""
    model = mlp(layers)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    loss_of = torch.compile(lambda inputs, targets: F.cross_entropy(model(inputs), targets))
    update = torch.compile(optimizer.step)

    def step(inputs: Tensor, targets: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss: Tensor = loss_of(inputs, targets)
        loss.backward()
        update()
        return loss

    return step


def measured(layers: int) -> dict[str, float]:
    """Microseconds a call of both sides, and their ratio call by call."""
    inputs, targets = torch.randn(BATCH, WIDTH), torch.randint(0, CLASSES, (BATCH,))
    sides = [ours(layers), stock(layers)]
    for _ in range(WARM_UP):
        losses = [side(inputs, targets).item() for side in sides]
    assert abs(losses[0] - losses[1]) < 1e-4, losses
    taken: list[list[float]] = [[], []]
    for _ in range(CALLS):
        for side, seconds in zip(sides, taken, strict=True):
            began_s = time.thread_time()
            side(inputs, targets)
            seconds.append(time.thread_time() - began_s)
    own_us, stock_us = (1e6 * statistics.median(seconds) for seconds in taken)
    return {
        "ours_us": own_us,
        "stock_us": stock_us,
        "ratio": own_us / stock_us,
        "ratio_of_least": min(taken[0]) / min(taken[1]),
    }


def main() -> None:
    """Measure, print a table, write a report."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("-o", type=Path)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    found = {f"{layers} layers": measured(layers) for layers in LAYERS}
    table = Table("model", "ours, us a call", "stock", "ratio of medians", "of the least")
    for name, row in found.items():
        cells = [f"{row['ours_us']:.0f}", f"{row['stock_us']:.0f}"]
        table.add_row(name, *cells, f"{row['ratio']:.3f}", f"{row['ratio_of_least']:.3f}")
    Console().print(table)
    if arguments.o:
        write_report(arguments.o, __doc__.splitlines()[0], found)


if __name__ == "__main__":
    main()

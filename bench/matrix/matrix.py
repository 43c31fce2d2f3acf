"""Which loops are captured whole, with eager's numbers? Models, optimizers and idioms, crossed.

python -m bench.matrix.matrix --sample 40 -o bench/results/matrix.json --page docs/matrix.md

With --resume the cells that came out equal in the output file are not run again.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import random
import re
import warnings
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch._dynamo.utils import counters

from bench.matrix.causes import Cause, as_traced, no_digit, other_way
from bench.matrix.page import write_page
from bench.matrix.steps import (
    ARCHITECTURES,
    IDIOMS,
    OPTIMIZERS,
    CompileWith,
    LossOf,
    Step,
    make_batch,
    make_model,
    objective_of,
)
from bench.report import write_report
from cotrain_compile.errors import CotrainError

CALLS = 6
POLICY = "zero-offload"

# Largest difference of losses, and of tensors: of parameters relative to the largest change of one,
# of states relative to the largest of their kind. Float64 steps differ where torch's compiled Adam
# takes bias corrections in float32, and where a model itself computes in float32. In bfloat16 the
# rounding of a weight flips whole ulps of activations; where a gradient is rounding only (the bias
# of an attention's keys), Adam then moves another way: by up to one update in these calls.
ROUNDING = {False: (1e-5, 1e-3), True: (2e-2, 1 / CALLS)}

Cell = tuple[str, str, str]
Kinds = dict[str, dict[str, Tensor]]  # by parameter (or call), by kind
Parted = tuple[Kinds, Kinds]  # losses, tensors


@dataclass(frozen=True)
class Result:
    """A cell: what came of it, the graphs it took, and how far it is from eager.

    "rounding" is equal but for what `matrix_causes` shows to be rounding.
    """

    architecture: str
    optimizer: str
    idiom: str
    status: str  # "equal", "rounding", "different" or "refused"
    graphs: int = 0
    loss_difference: float = 0.0
    tensor_difference: float = 0.0
    message: str = ""


@dataclass(frozen=True)
class Distance:
    """How far two runs of a cell are apart: losses at most, and every element of its tensors."""

    loss: float
    tensors: dict[tuple[str, str], Tensor]

    @property
    def tensor(self) -> float:
        """The largest difference of a tensor."""
        return max(float(far.max()) for far in self.tensors.values())


def cells() -> list[Cell]:
    """All cells of the matrix."""
    return list(itertools.product(ARCHITECTURES, OPTIMIZERS, IDIOMS))


def sample(count: int, seed: int = 0) -> list[Cell]:
    """`count` cells in a seeded order in which pairs of two axes come evenly."""
    order = random.Random(seed)
    left = cells()
    order.shuffle(left)
    chosen: list[Cell] = []
    seen: Counter[tuple[str, ...]] = Counter()
    while left and len(chosen) < count:
        cell = min(left, key=lambda c: sum(seen[pair] for pair in itertools.combinations(c, 2)))
        left.remove(cell)
        chosen.append(cell)
        seen.update(itertools.combinations(cell, 2))
    return chosen


def in_eager(step: Step, **_: Any) -> Step:
    """`step` as it is."""
    return step


def run(
    cell: Cell, compile_with: CompileWith = in_eager, objective: LossOf | None = None
) -> Parted:
    """Losses of every call; then changes of the model's tensors and the optimizer's states."""
    architecture, optimizer_name, idiom_name = cell
    idiom = IDIOMS[idiom_name]
    torch.manual_seed(0)
    model = make_model(architecture, idiom.dtype)
    batches = [make_batch(architecture) for _ in range(CALLS)]
    optimizer = OPTIMIZERS[optimizer_name](model.parameters())
    step = idiom.make(model, optimizer, objective or objective_of(cell), compile_with)
    before = {name: value.double() for name, value in model.state_dict().items()}
    losses = {str(call): step(*batch).detach() for call, batch in enumerate(batches)}
    kinds = {
        "parameter": {name: v.double() - before[name] for name, v in model.state_dict().items()}
    }
    for name, param in model.named_parameters():
        for key, value in optimizer.state[param].items():
            kinds.setdefault(key, {})[name] = torch.as_tensor(value).detach()
    return {"loss": losses}, kinds


def compiled(step: Step, **options: Any) -> Step:
    """`step` by our backend."""
    return torch.compile(step, backend="cotrain", options={"policy": POLICY, **options})


def evaluate(cell: Cell) -> Result:
    """Run `cell` in eager and with our backend, and compare."""
    torch._dynamo.reset()
    counters.clear()
    eager = run(cell)
    try:
        ours = run(cell, compiled)
    except CotrainError as error:
        message = re.sub(r"(?<!\w)/\S*/", "", str(error))  # no folders of the machine it was met on
        return Result(*cell, status="refused", message=f"{type(error).__name__}: {message}")
    graphs = int(counters["stats"]["unique_graphs"])
    far = distance(ours, eager)
    causes = [] if is_near(cell, far) else causes_of(cell, ours, far)
    loss_limit, _ = limits(cell)
    explained = all(cause.is_rounding for cause in causes)
    is_right = far.loss <= loss_limit and graphs == graphs_of(cell) and explained
    status = ("rounding" if causes else "equal") if is_right else "different"
    return Result(*cell, status, graphs, far.loss, far.tensor, "; ".join(map(str, causes)))


def causes_of(cell: Cell, ours: Parted, far: Distance) -> Sequence[Cause]:
    """Why `ours` is so `far` from eager: the model's way in a trace, or else tensor by tensor."""
    torch._dynamo.reset()
    traced = distance(ours, run(cell, objective=as_traced(objective_of(cell))))
    if is_near(cell, traced):
        return [other_way(cell, traced.loss, traced.tensor)]
    _, limit = limits(cell)
    beyond = {key: apart > limit for key, apart in far.tensors.items() if apart.max() > limit}
    return [no_digit(cell, name, kind, where) for (name, kind), where in beyond.items()]


def limits(cell: Cell) -> tuple[float, float]:
    """How far losses and tensors of equal runs of `cell` may be apart."""
    return ROUNDING[IDIOMS[cell[2]].half_precision]


def is_near(cell: Cell, far: Distance) -> bool:
    """Whether runs that are so `far` apart count as equal."""
    loss, tensor = limits(cell)
    return far.loss <= loss and far.tensor <= tensor


def graphs_of(cell: Cell) -> int:
    """How many graphs the loop of a cell takes."""
    # Where the model computes the loss, ViT's first forward writes the kind of problem into its
    # configuration, which the second one then finds there.
    writes_on_itself = cell[0] == "vit" and IDIOMS[cell[2]].own_loss
    return IDIOMS[cell[2]].graphs + writes_on_itself


def distance(ours: Parted, eager: Parted) -> Distance:
    """How far two runs of a cell are apart."""
    losses, tensors = (differences(a, b) for a, b in zip(ours, eager, strict=True))
    return Distance(max(float(far.max()) for far in losses.values()), tensors)


def differences(ours: Kinds, eager: Kinds) -> dict[tuple[str, str], Tensor]:
    """Differences by tensor and kind, relative to the largest element of that kind."""
    assert ours.keys() == eager.keys()
    found = {}
    for kind in eager:
        assert ours[kind].keys() == eager[kind].keys()
        largest = flat(list(eager[kind].values())).norm(math.inf) or 1.0
        for name, value in eager[kind].items():
            found[name, kind] = (ours[kind][name].double() - value.double()).abs() / largest
    return found


def flat(tensors: Sequence[Tensor]) -> Tensor:
    """All elements of `tensors`, in float64."""
    return torch.cat([tensor.double().flatten() for tensor in tensors])


def write(results: Sequence[Result], output: Path, page: Path | None) -> None:
    """Write the JSON, and the page where one is asked for."""
    summary = {
        "cells_in_all": len(cells()),
        "calls": CALLS,
        "policy": POLICY,
        "rounding": {"float64": ROUNDING[False], "bfloat16": ROUNDING[True]},
        "cells": [asdict(result) for result in results],
    }
    write_report(output, (__doc__ or "").splitlines()[0], summary)
    if page is not None:
        write_page(page, summary)


def main() -> None:
    """Run all cells, or a sample; write the JSON and the page."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("-o", "--output", type=Path, required=True)
    parser.add_argument("--page", type=Path)
    parser.add_argument("--sample", type=int, help="so many cells instead of all")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--resume", action="store_true", help="keep what OUTPUT found equal")
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")
    count = len(cells()) if arguments.sample is None else arguments.sample
    kept = equal_cells(arguments.output) if arguments.resume else {}
    results: list[Result] = list(kept.values())
    for cell in sample(count, arguments.seed):
        if cell in kept:
            continue
        results.append(evaluate(cell))
        print(*cell, results[-1].status, results[-1].graphs, results[-1].message[:300], flush=True)
        write(results, arguments.output, arguments.page)  # a run that is stopped leaves what it has


def equal_cells(path: Path) -> dict[Cell, Result]:
    """What an earlier run found equal."""
    found = [Result(**cell) for cell in json.loads(path.read_text())["result"]["cells"]]
    return {(r.architecture, r.optimizer, r.idiom): r for r in found if r.status == "equal"}


if __name__ == "__main__":
    main()

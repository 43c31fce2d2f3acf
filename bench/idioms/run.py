"""Is each way to write a step captured exactly, or refused with advice that works? Idioms, crossed.

python -m bench.idioms.run --minutes 90 -o bench/results/reliability_idioms.json

An idiom is trained in eager and compiled, in some cells of policy x host kernels x lowering, and
compared. Where it is refused, the advice of the refusal is followed: the program that a user then
has is trained and compared instead. `--only WORDS` runs the idioms whose names hold the words, and
`--turn 1` takes other cells. After `--minutes`, or Ctrl-C, what there is until then is written;
`--skip 236` goes on behind so many idioms of those that are chosen, `--count 100` does so many.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import json
import math
import re
import subprocess
import sys
import time
import warnings
from collections import Counter
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch.optim import Optimizer
from torch.utils._pytree import tree_leaves, tree_map

import cotrain_compile
from bench.idioms import all_idioms
from bench.idioms.registry import Idiom, Step, Training
from bench.report import write_report
from cotrain_compile.errors import (
    CotrainError,
    LoweringError,
    OutOfDeviceMemory,
    PlacementError,
)
from cotrain_compile.machine import Tier
from tests.support.fuzz.fuzz_compare import (
    Broken,
    Left,
    compare,
    compiled_corrections,
    gaps,
    nudge,
)

SEED = 3
SHARE = 0.6  # of the resident peak: the budget of the cells with policy "auto"
# Captured ops are eager's. Fused loops, and what Inductor fuses, are within rounding of them.
SAME_OPS, ROUNDED = 1e-12, 1e-5
NUDGED_RUNS = 3
ROOMY_BYTES = 1 << 20  # a budget in which every idiom fits
IN_ONE_PROCESS = 40
RESULT = "result "  # before each line of a worker that is one

Cell = tuple[str, str, str]
POLICIES = ("zero-offload", "auto", "streamed", "resident")
CELLS: list[Cell] = list(itertools.product(POLICIES, ("fused", "captured"), ("eager", "inductor")))


@dataclass(frozen=True)
class Result:
    """What came of an idiom in a cell: "equal", "refused" with advice that works, or "broken"."""

    idiom: str
    cell: str
    status: str
    message: str = ""


def cells_of(index: int, count: int) -> list[Cell]:
    """`count` cells for the idiom at `index`: neighbours get others, and all come evenly.

    One in four is lowered by Inductor, whose compilation takes most of a run.
    """
    eager, inductor = ([c for c in CELLS if c[2] == lowering] for lowering in ("eager", "inductor"))
    order = [eager[(5 * index + 3 * k) % 8] for k in range(8)]
    if index % 4 == 3:
        order = [inductor[(index // 4 + 3 * k) % 8] for k in range(8)]
    return [*order, *(c for c in CELLS if c not in order)][:count]


def evaluate(idiom: Idiom, cell: Cell) -> Result:
    """Train `idiom` in eager and in `cell`, or what its refusal advises, and compare."""
    name = "/".join(cell)
    try:
        try:
            check(idiom.make, cell)
        except LoweringError as error:  # "Run it in eager with eager_segments"
            check(idiom.make, cell, eager_segments=[error.segment])
            return Result(idiom.name, name, "refused")
        except OutOfDeviceMemory:  # "Raise memory_budget"
            check(idiom.make, cell, memory_budget=ROOMY_BYTES)
            return Result(idiom.name, name, "refused")
        except CotrainError as error:
            if idiom.instead is None:
                return Result(idiom.name, name, "broken", f"refused without a way on: {error}")
            if not re.search(idiom.advice, str(error)):
                return Result(idiom.name, name, "broken", f"other advice: {error}")
            check(idiom.instead, cell)
            return Result(idiom.name, name, "refused")
    except Broken as error:
        return Result(idiom.name, name, "broken", str(error))
    except Exception as error:
        return Result(idiom.name, name, "broken", f"{type(error).__name__}: {error}"[:800])
    return Result(idiom.name, name, "equal")


def check(make: Callable[[], Training], cell: Cell, **options: Any) -> None:
    """Raise `Broken` where the program of `make` is not the same in eager and in `cell`.

    `options` are what a refusal of that cell advises.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with compiled_corrections():
            expected = train(make, lambda step: step)
        found = train(make, compile_in(make, cell, options))
    same_ops = cell[1:] == ("captured", "eager")
    relative = SAME_OPS if same_ops else ROUNDED
    spread = functools.partial(spread_of, make, expected)
    compare(expected, found, "the compiled step and eager", relative, spread)


def compile_in(
    make: Callable[[], Training], cell: Cell, advised: Mapping[str, Any]
) -> Callable[[Step], Step]:
    """A compiler for `cell`. Under "auto" the step has a share of what it takes resident."""
    policy, kernels, lowering = cell
    options = {"host_kernels": kernels, "lowering": lowering, "quiet": True, **advised}
    if "memory_budget" in advised:
        return lambda step: torch.compile(step, backend="cotrain", options=options)
    if policy != "auto":
        return lambda step: torch.compile(
            step, backend="cotrain", options={"policy": policy} | options
        )
    options["memory_budget"] = budget_for(make, options)
    return lambda step: torch.compile(step, backend="cotrain", options=options)


def budget_for(make: Callable[[], Training], options: dict[str, Any]) -> int:
    """`SHARE` of the resident peak, or the least that does, by what the refusal says is missing."""
    torch._dynamo.reset()
    torch.manual_seed(SEED)
    training = make()
    resident = torch.compile(
        training.step, backend="cotrain", options={"policy": "resident", **options}
    )
    resident(*training.batches[0])
    budget = int(SHARE * cotrain_compile.inspect(resident).predicted.peak_bytes[Tier.DEVICE])
    torch._dynamo.reset()
    torch.manual_seed(SEED)
    training = make()
    options = {**options, "memory_budget": budget}
    try:
        torch.compile(training.step, backend="cotrain", options=options)(*training.batches[0])
    except PlacementError as error:
        budget += error.shortfall_bytes
    return budget


def spread_of(make: Callable[[], Training], eager: Left) -> dict[str, float]:
    """By how much roundings alone may lead a program away from `eager`, by tensor.

    A gradient that is zero but for roundings, as that of the bias of keys in attention, is what
    Adam makes large: how far the widest of some runs goes whose parameters are rounded once more.
    """
    found: dict[str, float] = {}
    for seed in range(NUDGED_RUNS):
        with compiled_corrections():
            nudged = train(make, lambda step: step, prepare=functools.partial(nudge, seed=seed))
        for name, far in gaps(eager, nudged).items():
            found[name] = max(found.get(name, 0.0), len(eager.returned) * far)
    return found


def train(
    make: Callable[[], Training],
    compile_with: Callable[[Step], Step],
    prepare: Callable[[nn.Module], None] = lambda module: None,
) -> Left:
    """Run the program of `make`, its modules prepared, and return what it leaves.

    Raises `Broken` where it is compiled more often than it says.
    """
    torch._dynamo.reset()
    counters.clear()
    torch.manual_seed(SEED)
    training = make()
    for thing in training.watched:
        if isinstance(thing, nn.Module):
            prepare(thing)
    step = compile_with(training.step)
    left = Left()
    for batch in training.batches:
        left.returned.append(detached(step(*batch)))
    cotrain_compile.synchronize()
    for i, thing in enumerate(training.watched):
        left.tensors.update({f"{i}.{k}": v for k, v in tensors_of(thing).items()})
    left.tensors["generator"] = torch.get_rng_state()
    if (graphs := counters["stats"]["unique_graphs"]) > training.compiles:
        raise Broken(f"{graphs} graphs for {len(training.batches)} steps")
    return left


def tensors_of(thing: nn.Module | Optimizer | Tensor) -> dict[str, Tensor]:
    """Copies of all that training changes in it, by name."""
    if isinstance(thing, Tensor):
        named: dict[str, Any] = {"tensor": thing}
    elif isinstance(thing, nn.Module):
        named = dict(thing.state_dict())
    else:
        leaves = tree_leaves(thing.state_dict()["state"])
        named = {f"state {i}": leaf for i, leaf in enumerate(leaves)}
    return {k: v.detach().clone() for k, v in named.items() if isinstance(v, Tensor)}


def detached(value: Any) -> Any:
    """`value` with copies of its tensors."""
    return tree_map(lambda t: t.detach().clone() if isinstance(t, Tensor) else t, value)


def campaign(names: list[str], cells: int, turn: int = 0) -> Generator[Result]:
    """Results of idioms; each process runs some of them, since Dynamo keeps something of each."""
    for at in range(0, len(names), IN_ONE_PROCESS):
        left = names[at : at + IN_ONE_PROCESS]
        while left:
            command = [sys.executable, "-m", "bench.idioms.run", "--worker", str(cells)]
            command += ["--turn", str(turn), *left]
            with subprocess.Popen(
                command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
            ) as worker:
                assert worker.stdout is not None
                done: Counter[str] = Counter()
                try:
                    for line in worker.stdout:
                        if not line.startswith(RESULT):
                            continue  # some idioms print
                        result = Result(**json.loads(line.removeprefix(RESULT)))
                        done[result.idiom] += 1
                        yield result
                except BaseException:  # nobody wants to know the rest
                    worker.kill()
                    raise
            if worker.returncode == 0:
                break
            crashed = next(name for name in left if done[name] < cells)
            yield Result(crashed, "", "broken", f"the process ended with {worker.returncode}")
            left = left[left.index(crashed) + 1 :]


def work(names: list[str], cells: int, turn: int) -> None:
    """Evaluate idioms and print each result as a line."""
    torch.set_num_threads(1)
    index = {name: i + turn for i, name in enumerate(all_idioms())}
    for name in names:
        for cell in cells_of(index[name], cells):
            result = asdict(evaluate(all_idioms()[name], cell))
            print(f"\n{RESULT}{json.dumps(result)}", flush=True)


def main() -> None:
    """Run the idioms and write what came of them."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--cells", type=int, default=1, help="cells that each idiom is run in")
    parser.add_argument("--turn", type=int, default=0, help="for other cells")
    parser.add_argument("--minutes", type=float, default=math.inf, help="when to end at the latest")
    parser.add_argument("--only", default="", help="words in the names of idioms, or a topic")
    parser.add_argument("--skip", type=int, default=0, help="idioms to leave out, from the first")
    parser.add_argument("--count", type=int, help="how many idioms; else all that are left")
    parser.add_argument("-o", "--output", type=Path)
    parser.add_argument("--worker", type=int, help=argparse.SUPPRESS)
    parser.add_argument("names", nargs="*", help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.worker:
        work(asked.names, asked.worker, asked.turn)
        return
    chosen = [n for n, i in all_idioms().items() if asked.only in n or asked.only == i.topic]
    chosen = chosen[asked.skip :][: asked.count]
    results: list[Result] = []
    began = time.monotonic()
    with suppress(KeyboardInterrupt), closing(campaign(chosen, asked.cells, asked.turn)) as found:
        for result in found:
            results.append(result)
            if result.status == "broken" or asked.only:
                said = (result.status, result.idiom, result.cell, result.message)
                print(" | ".join(said), flush=True)
            if time.monotonic() - began > 60 * asked.minutes:
                break
    figures = figures_of(results, (time.monotonic() - began) / 60)
    print(figures["campaign"], figures["held"], "equal,", figures["refused"], "refused")
    if asked.output is not None:
        write_report(asked.output, (__doc__ or "").splitlines()[0], figures)


def figures_of(results: Sequence[Result], minutes: float) -> dict[str, Any]:
    """What `bench.reliability.page` puts on its page."""
    counts = Counter(result.status for result in results)
    ran = {result.idiom for result in results}
    return {
        "campaign": f"ways to write a step, {len(ran)} of {len(all_idioms())}; "
        "a refusal's advice is followed",
        "cases": len(results),
        "held": counts["equal"],
        "refused": counts["refused"],
        "faults": 0,
        "broken": [
            {"what": f"{r.idiom} ({r.cell}): {r.message}"} for r in results if r.status == "broken"
        ],
        "kinds": Counter(all_idioms()[result.idiom].topic for result in results),
        "minutes": round(minutes, 1),
    }


if __name__ == "__main__":
    main()

"""Do pipelines take what their plans say? Stages of two ranks, on devices and ways that are slow.

Two processes with gloo train a residual MLP in stages: by GPipe and 1F1B with everything on the
device, by 1F1B within a budget that does not hold a stage, and by Harmony's swapped stages, two on
each rank. All of it is throttled, so that other work on the machine counts little: a layer takes
30 ms forward and 60 ms backward, for which a turn sleeps; copies take what a link of 7 MB/s says;
and ranks have a network of their own, whose loopback sends `--rate`. Turns within a budget do not
sleep: what they take are their copies.

What a step is predicted to take is what the cluster planner simulates of these seconds, and of
turns within a budget what their own plans predict. Told are step times (the median), the peaks of
all turns as planned and as metered, and the bytes that ranks send and swap. It needs root,
`unshare`, `ip` and `tc`.

    python -m bench.runtime.pipelines -o bench/results/pipelines.json
"""

from __future__ import annotations

import argparse
import functools
import json
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as processes
from torch import nn
from torch.nn import functional as F

import cotrain_compile
from bench.report import write_report
from bench.results_page.tables import markdown
from bench.runtime.own_network import on_own_network
from cotrain_compile import files, presets
from cotrain_compile.cluster import pipeline as resident_stages
from cotrain_compile.cluster import stages_in_turn
from cotrain_compile.cluster.harmony_lanes import Server
from cotrain_compile.cluster.harmony_packs import Pack, PackCosts
from cotrain_compile.cluster.pipeline_works import Draft, Swapped
from cotrain_compile.cluster.profiles import (
    BATCH,
    Layer,
    LayerProfile,
    Read,
    constant,
    per_sample,
)
from cotrain_compile.cluster.stage_away import StageAway
from cotrain_compile.cluster.stage_plan import StagePlan
from cotrain_compile.cluster.stages import PipelineOrder, Stages
from cotrain_compile.machine import Link, Network, Tier
from cotrain_compile.pipelining.turns import Turns
from cotrain_compile.plan import Timeline
from cotrain_compile.runtime.network import sleep_until
from cotrain_compile.units import format_bytes, format_seconds

RANKS, LAYERS, WIDTH, ROWS, MICRO_BATCHES = 2, 8, 256, 64, 8
HOP_BYTES = 4 * ROWS * WIDTH
FORWARD_S, BACKWARD_S = 0.03, 0.06  # of a layer with one micro-batch
LINK = Link(7e6, 250e-6)
WARM_UP, BUDGET_BYTES = 1, 3_000_000


@dataclass(frozen=True)
class Case:
    """Stages that begin at these layers, and the options beside those of all."""

    name: str
    schedule: str
    layers: tuple[int, ...]
    options: Mapping[str, Any]
    swapped: bool = False

    @property
    def plan(self) -> StagePlan:
        """For `cotrain_compile.pipeline`."""
        points = tuple(f"layers.{layer}" for layer in self.layers)
        return StagePlan(self.schedule, points, MICRO_BATCHES, ROWS, swapped=self.swapped)

    @property
    def stages(self) -> int:
        """On all ranks."""
        return len(self.layers) + 1


RESIDENT = {"policy": "resident"}
TIGHT = {"memory_budget": BUDGET_BYTES, "time_limit": 2.0}
CASES = (
    Case("GPipe", "GPipe", (4,), RESIDENT),
    Case("1F1B", "1F1B", (4,), RESIDENT),
    Case("1F1B in a budget", "1F1B", (4,), TIGHT),
    Case("swapped stages", "LoopedBFS", (2, 4, 6), RESIDENT, swapped=True),
)


class Residual(nn.Module):
    """A layer with its residual."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + F.gelu(self.inner(x))


class Model(nn.Module):
    """Equal layers, one behind the other."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Residual() for _ in range(LAYERS))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


class Run:
    """The training of a case on this rank, and what its steps took."""

    def __init__(self, case: Case, machine: Path) -> None:
        torch.manual_seed(0)
        self.case, self.model = case, Model()
        options = {"quiet": True, "poison": False, "machine": str(machine), "throttle": True}
        self.x = torch.randn(MICRO_BATCHES * ROWS, WIDTH)
        self.pipe = cotrain_compile.pipeline(
            self.model, case.plan, F.mse_loss, (self.x,), self.x, options=options | case.options
        )
        self.update = self.pipe.compiled_update(torch.optim.SGD(self.model.parameters(), lr=1e-3))
        self.step_s: list[float] = []
        self.steps = 0
        if "memory_budget" not in case.options:
            for stage in self.pipe.stages:
                throttle(stage.turns, LAYERS // case.stages)

    @property
    def turns(self) -> list[Callable[..., Any]]:
        """The functions of all stages of this rank, stage by stage."""
        return [function for stage in self.pipe.stages for function in stage.turns.functions]

    def step(self, *, counts: bool) -> None:
        """A step of all ranks."""
        dist.barrier()
        began_s = time.perf_counter()
        self.pipe.step(self.x, target=self.x)
        taken_s = time.perf_counter() - began_s
        self.update()
        self.steps += 1
        if counts:
            self.step_s.append(taken_s)

    def found(self) -> dict[str, Any]:
        """What rank 0 is told of this one."""
        swaps = self.pipe.memory.swaps
        plans = [cotrain_compile.inspect(function).plan for function in self.turns]
        return {
            "step_s": statistics.median(self.step_s),
            "turn_s": [plan.predicted.makespan_s for plan in plans],
            "peaks": [_peaks(function) for function in (*self.turns, self.update)],
            "sent_bytes": sum(stage.sent_bytes for stage in self.pipe.stages) // self.steps,
            "fetched_bytes": swaps.fetched_bytes // self.steps if swaps else 0,
            "home_bytes": swaps.sent_bytes // self.steps if swaps else 0,
        }


def throttle(turns: Turns, layers: int) -> None:
    """Let turns of a stage with so many layers take what these do; all run their forward, too."""
    for name, layer_s in (
        ("_forward", FORWARD_S),
        ("_backward", FORWARD_S + BACKWARD_S),
        ("_whole", FORWARD_S + BACKWARD_S),
    ):
        setattr(turns, name, _slowed(getattr(turns, name), layers * layer_s))


def _slowed(run: Callable[..., Any], seconds: float) -> Callable[..., Any]:
    @functools.wraps(run)  # so that `inspect` finds what is behind it
    def slowed(*args: Any) -> Any:
        ends_s = time.perf_counter() + seconds
        result = run(*args)
        sleep_until(ends_s)
        return result

    return slowed


def _measured(function: Callable[..., Any]) -> Timeline:
    timeline = cotrain_compile.inspect(function).measured
    assert timeline is not None
    return timeline


def _peaks(function: Callable[..., Any]) -> tuple[int, int]:
    planned = cotrain_compile.inspect(function).plan.predicted.peak_bytes[Tier.DEVICE]
    return planned, _measured(function).peak_bytes[Tier.DEVICE]


def train(rank: int, folder: str, rounds: int) -> None:
    """On one rank: all cases in turn; the first one writes what was found."""
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/store", rank=rank, world_size=RANKS
    )
    hop = measured_hop(rank)
    machine = presets.find(presets.THIS_MACHINE).but(h2d=LINK, d2h=LINK, duplex=2.0)
    path = Path(folder, f"machine{rank}.json")
    files.save(machine, path)
    runs = {case.name: Run(case, path) for case in CASES}
    for number in range(WARM_UP + rounds):
        for run in runs.values():
            run.step(counts=number >= WARM_UP)
    found: list[Any] = [None] * RANKS
    dist.all_gather_object(found, {name: run.found() for name, run in runs.items()})
    if rank == 0:
        records = [_record(case, [of_rank[case.name] for of_rank in found], hop) for case in CASES]
        result = {"records": records, "hop_bytes_per_s": hop.bytes_per_s, "hop_s": hop.latency_s}
        Path(folder, "found.json").write_text(json.dumps(result))
    dist.barrier()
    dist.destroy_process_group()


def measured_hop(rank: int) -> Network:
    """What one rank sends to the other: two sizes, back and forth, the median of each."""
    sizes = (64, HOP_BYTES)
    medians = []
    for nbytes in sizes:
        data, taken = torch.zeros(nbytes, dtype=torch.uint8), []
        for _ in range(12):
            dist.barrier()
            time.sleep(0.01)  # the network is idle between two sends of a pipeline, too
            began_s = time.perf_counter()
            for sender in range(RANKS):
                (dist.send if rank == sender else dist.recv)(data, 1 - rank)
            taken.append((time.perf_counter() - began_s) / RANKS)
        medians.append(statistics.median(taken[2:]))
    least, most = medians
    told = torch.tensor([least, (most - least) / (sizes[1] - sizes[0])], dtype=torch.float64)
    dist.broadcast(told, 0)
    latency_s, byte_s = told.tolist()
    return Network(1 / byte_s, latency_s)


def _record(case: Case, ranks: Sequence[Mapping[str, Any]], hop: Network) -> dict[str, Any]:
    if case.swapped:
        predicted_s, moved = _swapped(hop)
    else:
        budgeted = "memory_budget" in case.options
        turn_s = [of_rank["turn_s"] for of_rank in ranks] if budgeted else _throttled(4)
        predicted_s, moved = _resident(case, turn_s, hop)
    measured_s = max(of_rank["step_s"] for of_rank in ranks)
    peaks = [peak for of_rank in ranks for peak in of_rank["peaks"]]
    return {
        "case": case.name,
        "predicted_s": predicted_s,
        "measured_s": measured_s,
        "time_error": predicted_s / measured_s - 1,
        "peak_error": max(abs(planned - metered) / max(metered, 1) for planned, metered in peaks),
        "peak_bytes": max(metered for _, metered in peaks),
        "planned_bytes": moved,
        "moved_bytes": {name: [of_rank[f"{name}_bytes"] for of_rank in ranks] for name in moved},
        "ranks": list(ranks),
    }


def _throttled(layers: int) -> list[list[float]]:
    """Turns of two stages with so many layers."""
    both_s = layers * (FORWARD_S + BACKWARD_S)
    return [[layers * FORWARD_S, both_s], [both_s]]


def _resident(
    case: Case, turn_s: Sequence[Sequence[float]], hop: Network
) -> tuple[float, dict[str, list[int]]]:
    """The planner's GPipe and 1F1B, with what each rank moves; `turn_s` is by rank.

    The last stage's turn is a forward with all that follows.
    """
    (forward_s, backward_s), (whole_s,) = turn_s
    draft = Draft(
        PipelineOrder(case.schedule.lower()),
        Stages(("stage0", "stage1"), (0, 1, 2), (0, 0)),
        ROWS,
        MICRO_BATCHES,
        True,
        (forward_s, whole_s),
        (backward_s, 0.0),
        (0.0, 0.0),
        (hop.latency_s + HOP_BYTES / hop.bytes_per_s,),
        (StageAway(),) * RANKS,
        (Swapped(),) * RANKS,
    )
    plan = resident_stages.simulated(_profile(case.stages), draft)
    return plan.step_s, {"sent": [plan.hop_bytes[0] // 2] * RANKS}


def _swapped(hop: Network) -> tuple[float, dict[str, list[int]]]:
    """The planner's stages in turn, with what each rank moves."""
    profile = _profile(4)
    stage_bytes = profile.layers[0].param_bytes
    copies = 2 * LAYERS // 4  # weight and bias of each layer
    server = Server(
        RANKS,
        swap_bytes_per_s=1e18,
        link_bytes_per_s=1 / (1 / LINK.bytes_per_s + copies * LINK.latency_s / stage_bytes),
        peer_bytes_per_s=1 / (1 / hop.bytes_per_s + hop.latency_s / HOP_BYTES),
    )
    packs = tuple(Pack(k, k + 1) for k in range(4))
    draft = stages_in_turn.Draft(PackCosts(profile), server, packs, ROWS, MICRO_BATCHES)
    plan = stages_in_turn.simulated(draft)
    planned = {
        "sent": [3 * MICRO_BATCHES * HOP_BYTES] * RANKS,
        "fetched": [3 * stage_bytes] * RANKS,
        "home": [2 * stage_bytes] * RANKS,
    }
    links = ("between devices of a machine", "host to devices", "devices to host")
    for (name, of_ranks), link in zip(planned.items(), links, strict=True):
        assert sum(of_ranks) == plan.moved_bytes[link], name
    return plan.step_s, planned


def _profile(stages: int) -> LayerProfile:
    """Stages as layers, with what their turns take with one micro-batch."""
    layers = LAYERS // stages
    nbytes = layers * 4 * (WIDTH * WIDTH + WIDTH)
    enters = partial(Read, nbytes=per_sample(4 * WIDTH))
    found = [
        Layer(
            name=f"stage{k}",
            op="stage",
            reads=(enters(f"stage{k - 1}" if k else BATCH),),
            forward_s=constant(layers * FORWARD_S),
            backward_s=constant(layers * BACKWARD_S),
            param_bytes=nbytes,
            grad_bytes=nbytes,
            forward_peak_bytes=constant(nbytes),
            backward_peak_bytes=constant(2 * nbytes),
        )
        for k in range(stages)
    ]
    return LayerProfile("stages", tuple(found))


def table(result: Mapping[str, Any]) -> str:
    """A row for each case."""
    rows = [
        (
            each["case"],
            format_seconds(each["predicted_s"]),
            format_seconds(each["measured_s"]),
            f"{100 * each['time_error']:+.1f} %",
            f"{format_bytes(each['peak_bytes'])}, {100 * each['peak_error']:.1f} %",
            _moved(each, "sent"),
            _swaps(each),
        )
        for each in result["records"]
    ]
    headings = ("stages", "predicted", "measured", "error", "largest peak of a turn, error")
    told = (
        f"A hop brings {result['hop_bytes_per_s'] / 1e6:.1f} MB a second. Bytes are of each rank "
        "in a step, as planned and as counted; where these differ, both are told."
    )
    return "\n".join((markdown((*headings, "sent", "fetched, sent home"), rows), told))


def _swaps(each: Mapping[str, Any]) -> str:
    names = [name for name in ("fetched", "home") if name in each["planned_bytes"]]
    return ", ".join(_moved(each, name) for name in names)


def _moved(each: Mapping[str, Any], name: str) -> str:
    planned, moved = each["planned_bytes"][name], each["moved_bytes"][name]
    if planned != moved:
        return f"{moved} for {planned}"
    return " and ".join(dict.fromkeys(map(format_bytes, moved)))


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, print the table, and write the report."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("-o", "--output", type=Path)
    parser.add_argument("--rate", default="30mbit", help="of the loopback, as tc has it")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    given = parser.parse_args(arguments)
    if given.worker is not None:
        processes.spawn(train, (given.worker, given.rounds), nprocs=RANKS)
        return
    with tempfile.TemporaryDirectory() as folder:
        asked = ["--worker", folder, "--rounds", str(given.rounds)]
        on_own_network("bench.runtime.pipelines", given.rate, asked, burst="16kb", mtu=9000)
        result = json.loads(Path(folder, "found.json").read_text())
    records = result["records"]
    result |= {
        "rate": given.rate,
        "rounds": given.rounds,
        "summary": {
            "time_error_worst": max(abs(each["time_error"]) for each in records),
            "peak_error_worst": max(each["peak_error"] for each in records),
            "bytes_as_planned": all(e["planned_bytes"] == e["moved_bytes"] for e in records),
        },
    }
    print(table(result))
    print(result["summary"])
    if given.output is not None:
        write_report(given.output, (__doc__ or "").splitlines()[0], result)


if __name__ == "__main__":
    main()

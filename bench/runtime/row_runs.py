"""Do rows of an answer take what they say? Layouts on four ranks, each with a network card.

Processes with gloo train layers that take a time by `cotrain_compile.scale`, as each layout says,
over network cards that send and receive `--rate`. A layer sleeps for what it takes with the samples
and the part of it that a rank has; where layers run again it sleeps again. Predicted is the step
that the planner of layouts simulates, of these seconds and of the network as all ranks together
have measured it there. All cases take turns.

Told are step times (the median), and the bytes that a rank exchanges in graphs and sends to other
stages, as planned and as counted. It needs root, `unshare`, `nsenter`, `ip` and `tc`.

    python -m bench.runtime.row_runs -o bench/results/row_runs.json
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel
from torch.nn import functional as F

import cotrain_compile
from bench.results_page.tables import markdown
from bench.runtime.own_network import HUB, take_card
from bench.runtime.rank_bench import RankBench, start
from cotrain_compile import files, presets
from cotrain_compile.cluster.composed.mesh import Mesh, MeshLinks, MeshOption, RankLayers
from cotrain_compile.cluster.composed.search import ComposedPlan
from cotrain_compile.cluster.model.description import Cluster, Devices, MachineGroup
from cotrain_compile.cluster.model.layout import Layout, StagePlan
from cotrain_compile.cluster.model.profiles import (
    BATCH,
    Division,
    Layer,
    LayerProfile,
    Read,
    constant,
    per_sample,
)
from cotrain_compile.dataflow import Collective
from cotrain_compile.graph.collectives import is_collective, kind_of, ranks_in
from cotrain_compile.machine import Network
from cotrain_compile.runtime.calibrate.link_bench import CpuBench, Sizes
from cotrain_compile.runtime.calibrate.network_bench import measured_network
from cotrain_compile.runtime.network import sleep_until
from cotrain_compile.support.units import format_bytes, format_seconds

RANKS, LAYERS, WIDTH, INNER, EXPERTS = 4, 4, 128, 256, 4
ROWS, TOKENS = 16, 4  # samples of a replica in a micro-batch, and tokens of a sample
FORWARD_S, BACKWARD_S = 0.4 / ROWS, 0.8 / ROWS  # of a sample
WARM_UP = 1


@torch.library.custom_op("cotrain_bench::passes", mutates_args=())
def passes(x: torch.Tensor, forward_s: float, backward_s: float) -> torch.Tensor:
    """`x`, when so long has passed; its gradient takes as long as is said."""
    sleep_until(time.perf_counter() + forward_s)
    return x.clone()


@passes.register_fake
def _(x: torch.Tensor, forward_s: float, backward_s: float) -> torch.Tensor:
    return torch.empty_like(x)


def _remember(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    ctx.seconds = inputs[2]


def _pass_back(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None]:
    return passes(gradient, ctx.seconds, 0.0), None, None


passes.register_autograd(_pass_back, setup_context=_remember)


class Experts(nn.Module):
    """Products, each for rows of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Parameter(0.1 * torch.randn(EXPERTS, WIDTH, INNER))
        self.down = nn.Parameter(0.1 * torch.randn(EXPERTS, INNER, WIDTH))

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return torch.bmm(F.gelu(torch.bmm(rows, self.up)), self.down)


class SlowLayer(nn.Module):
    """An MLP, or experts of which each has as many tokens, and the time that it takes."""

    def __init__(self, parts: int, mixes: bool) -> None:
        super().__init__()
        self.seconds = FORWARD_S / parts, BACKWARD_S / parts
        self.experts = Experts() if mixes else None
        if not mixes:
            self.up = nn.Linear(WIDTH, INNER, bias=False)
            self.down = nn.Linear(INNER, WIDTH, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        forward_s, backward_s = (len(x) * each for each in self.seconds)
        if self.experts is None:
            made = self.down(F.gelu(self.up(x)))
        else:  # the n-th token of each sample goes to the n-th expert
            made = self.experts(x.transpose(0, 1)).transpose(0, 1)
        out: torch.Tensor = x + passes(made, forward_s, backward_s)
        return out


class Model(nn.Module):
    """Equal layers, one behind the other."""

    def __init__(self, parts: int, mixes: bool) -> None:
        super().__init__()
        self.layers = nn.ModuleList(SlowLayer(parts, mixes) for _ in range(LAYERS))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


PARAM_BYTES = 4 * 2 * WIDTH * INNER
ROW_BYTES = 4 * TOKENS * WIDTH


def profile(mixes: bool) -> LayerProfile:
    """The model's layers, and what they take."""
    nbytes = PARAM_BYTES * (EXPERTS if mixes else 1)
    exchanged = per_sample(ROW_BYTES)
    split = Division(INNER, 1.0, 1.0, 1.0, exchanged, times=1)
    names = [f"layers.{i}" for i in range(LAYERS)]
    layers = [
        Layer(
            name=name,
            op="layer",
            reads=(Read(before, per_sample(ROW_BYTES)),),
            forward_s=per_sample(FORWARD_S),
            backward_s=per_sample(BACKWARD_S),
            param_bytes=nbytes,
            grad_bytes=nbytes,
            forward_peak_bytes=constant(nbytes),
            backward_peak_bytes=constant(2 * nbytes),
            kept_bytes=per_sample(ROW_BYTES),
            tensor=None if mixes else split,
            experts=replace(split, most=EXPERTS, seconds=0.0, times=2) if mixes else None,
        )
        for before, name in zip((BATCH, *names), names, strict=False)
    ]
    return LayerProfile("slow layers", tuple(layers))


@dataclass(frozen=True)
class Case:
    """A layout of all ranks."""

    layout: Layout

    @property
    def mixes(self) -> bool:
        """Whether its layers have experts."""
        return self.layout.experts > 1

    @property
    def stages(self) -> StagePlan | None:
        """Of its pipeline."""
        if self.layout.pipeline == 1:
            return None
        points = tuple(
            f"layers.{stage * LAYERS // self.layout.pipeline}"
            for stage in range(1, self.layout.pipeline)
        )
        return StagePlan("1F1B", points, self.layout.micro_batches, ROWS)

    @property
    def samples(self) -> int:
        """Of a replica in a step."""
        return ROWS * self.layout.micro_batches


WITHOUT_STAGES = (
    Case(Layout(replicate=4)),
    Case(Layout(shard=4)),
    Case(Layout(replicate=2, shard=2)),
    Case(Layout(replicate=2, tensor=2)),
    Case(Layout(shard=2, tensor=2)),
)
STAGES = (
    Case(Layout(pipeline=2, replicate=2, micro_batches=4)),
    Case(Layout(pipeline=2, shard=2, micro_batches=4)),
    Case(Layout(pipeline=2, tensor=2, micro_batches=4)),
)
WITH_EXPERTS = (Case(Layout(experts=4)), Case(Layout(replicate=2, experts=2)))


def planned(case: Case, network: Network) -> ComposedPlan:
    """The planner's step of that layout, on machines of one device with such a network card."""
    machine = presets.find("rtx4090")
    group = MachineGroup(
        "ranks", RANKS, machine.host, machine.host_update, (Devices(machine, 1),), nic=network
    )
    links = MeshLinks(Cluster("ranks", (group,)))
    own = case.layout
    mesh = Mesh(own, links, RankLayers(profile(case.mixes)), own.replicas * case.samples)
    found = [
        (option, plan) for option in mesh.options() if _as(option, case) for plan in option.plans()
    ]
    option, plan = min(found, key=lambda each: each[1].step.seconds)
    return ComposedPlan(mesh, option.layout, plan)


def _as(option: MeshOption, case: Case) -> bool:
    """Whether it runs as the case does: without stages nothing runs again, and a shard is gathered
    once."""
    found = option.layout
    staged = found.pipeline > 1
    alike = found.micro_batches == case.layout.micro_batches and found.recompute == staged
    return alike and (staged or found.shard == 1 or not found.gathered_again)


class Run:
    """The training of a case on this rank, and what its steps took."""

    def __init__(self, case: Case, machine: Path) -> None:
        torch.manual_seed(0)
        self.case, layout = case, case.layout
        model = Model(layout.tensor, case.mixes)
        self.x = torch.randn(case.samples, TOKENS, WIDTH)
        options = {"quiet": True, "poison": False, "policy": "resident", "machine": str(machine)}
        split = {"layers.*.up": ColwiseParallel(), "layers.*.down": RowwiseParallel()}
        self.scaled = cotrain_compile.scale(
            model, layout, F.mse_loss, (self.x,), self.x, stages=case.stages,
            tensor_plan=split if layout.tensor > 1 else None, experts=["layers.*.experts"],
            options=options,
        )  # fmt: skip
        self.step = self.scaled.compiled_step(torch.optim.SGD(self.scaled.parameters(), lr=1e-3))
        self.step_s: list[float] = []
        self.steps = 0

    def run(self, *, counts: bool) -> None:
        """A step of all ranks."""
        dist.barrier()
        began_s = time.perf_counter()
        self.step(self.x, target=self.x)
        self.steps += 1
        if counts:
            self.step_s.append(time.perf_counter() - began_s)

    def found(self) -> dict[str, Any]:
        """What rank 0 is told of this one."""
        pipe = self.scaled.pipe
        sent = sum(stage.sent_bytes for stage in pipe.stages) / self.steps if pipe else 0.0
        if pipe and pipe.gathered:
            sent += pipe.gathered.sent_bytes / self.steps
        replicas = self.case.layout.replicate
        if pipe and replicas > 1:  # summed beside the graphs
            grads = sum(param.nbytes for param in self.scaled.parameters())
            sent += Collective("all_reduce", replicas, grads).wire_bytes
        return {
            "step_s": statistics.median(self.step_s),
            "exchanged_bytes": sum(_exchanged(function, n) for function, n in self._functions()),
            "sent_bytes": sent,
        }

    def _functions(self) -> Iterator[tuple[Callable[..., Any], int]]:
        """All compiled ones, each with how often a step runs it."""
        if self.scaled.pipe is None:
            yield self.step, 1
            return
        for stage in self.scaled.pipe.stages:
            for function in stage.turns.functions:
                yield function, self.case.layout.micro_batches


def _exchanged(function: Callable[..., Any], times: int) -> float:
    """What a rank sends for all exchanges in the graph of a compiled function."""
    graph = cotrain_compile.inspect(function).graph.module.graph
    return times * sum(
        Collective(kind_of(node), ranks_in(node), _whole_bytes(node)).wire_bytes
        for node in graph.nodes
        if is_collective(node)
    )


def _whole_bytes(node: torch.fx.Node) -> int:
    """The larger one of what goes in and what comes out."""
    values = [node.meta["val"], *(each.meta["val"] for each in node.all_input_nodes)]
    return max(int(value.nbytes) for value in values)


def train_without_stages(rank: int, folder: str, rate: str, rounds: int) -> None:
    """On one of the ranks."""
    _train(WITHOUT_STAGES, rank, Path(folder), rate, rounds)


def train_stages(rank: int, folder: str, rate: str, rounds: int) -> None:
    """On one of the ranks."""
    _train(STAGES, rank, Path(folder), rate, rounds)


def train_experts(rank: int, folder: str, rate: str, rounds: int) -> None:
    """On one of the ranks."""
    _train(WITH_EXPERTS, rank, Path(folder), rate, rounds)


TRAININGS = (train_without_stages, train_stages, train_experts)


def _train(cases: Sequence[Case], rank: int, folder: Path, rate: str, rounds: int) -> None:
    """All cases in turn."""
    take_card(rank, rate)
    done = len(list(folder.glob("found*.json")))
    start(rank, RANKS, folder / f"store{done}")
    sizes = Sizes(small_copy_bytes=4096, exchange_bytes=1 << 19, repeats=5)
    network = measured_network(CpuBench(1 << 20), torch.device("cpu"), sizes)
    assert network is not None  # there are several ranks
    machine = folder / f"machine{rank}.json"
    files.save(presets.find(presets.THIS_MACHINE).but(network=network), machine)
    runs = [Run(case, machine) for case in cases]
    for number in range(WARM_UP + rounds):
        for run in runs:
            run.run(counts=number >= WARM_UP)
    records = [_record(run, network) for run in runs]
    if rank == 0:
        (folder / f"found{done}.json").write_text(json.dumps(records))
    dist.barrier()
    dist.destroy_process_group()


def _record(run: Run, network: Network) -> dict[str, Any]:
    ranks: list[Any] = [None] * RANKS
    dist.all_gather_object(ranks, run.found())
    plan = planned(run.case, network)
    measured_s = max(each["step_s"] for each in ranks)
    predicted_s = plan.step.seconds
    return {
        "case": str(run.case.layout),
        "predicted_s": predicted_s,
        "measured_s": measured_s,
        "time_error": predicted_s / measured_s - 1,
        "planned_bytes": sum(plan.traffic().values()) / RANKS,
        "moved_bytes": sum(each["exchanged_bytes"] + each["sent_bytes"] for each in ranks) / RANKS,
        "network": [network.bytes_per_s, network.latency_s, network.scatter],
        "ranks": ranks,
    }


def collected(folder: Path) -> dict[str, Any]:
    """All records, with how far they are off."""
    found = sorted(folder.glob("found*.json"))
    records = [record for path in found for record in json.loads(path.read_text())]
    errors = [abs(each["time_error"]) for each in records]
    summary = {"time_error_median": statistics.median(errors), "time_error_worst": max(errors)}
    return {"records": records, "summary": summary}


def table(result: Mapping[str, Any]) -> str:
    """A row for each layout."""
    rows: Sequence[Sequence[object]] = [
        (
            each["case"],
            format_seconds(each["predicted_s"]),
            format_seconds(each["measured_s"]),
            f"{100 * each['time_error']:+.1f} %",
            format_bytes(round(each["planned_bytes"])),
            format_bytes(round(each["moved_bytes"])),
        )
        for each in result["records"]
    ]
    headings = ("layout", "predicted", "measured", "error", "planned a rank", "moved")
    told = "\n\nLayers sleep; cards of 50 Mbit/s are between ranks."
    return markdown(headings, rows) + told


BENCH = RankBench(
    "bench.runtime.row_runs",
    __doc__ or "",
    [(train, RANKS) for train in TRAININGS],
    network=lambda rate: HUB,
    rate="50mbit",
    rounds=2,
    collected=collected,
    table=table,
)
main: Callable[..., None] = BENCH.main

if __name__ == "__main__":
    main()

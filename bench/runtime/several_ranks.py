"""Does communication hide behind compute? Steps of two ranks on a slow network, beside peers.

Two processes with gloo train an MLP whose exchanges take about as long as its compute. They have a
network of their own (a network namespace whose loopback sends `--rate`), which every way to train
shares: `DistributedDataParallel` in eager, compiled with its waits as planned, and compiled with
every exchange awaited at once; `fully_shard` in eager, in eager with `CPUOffloadPolicy`, and
compiled in the same two ways; and DeepSpeed's ZeRO-2 with the optimizer's state on the host, where
it is installed. All take turns, step by step; what is said are medians. The prediction is that of
the plan with the network as calibrated there, and with what ops took where every exchange is
awaited at once. It needs root, `unshare`, `ip` and `tc`.

    python -m bench.runtime.several_ranks -o bench/results/several_ranks.json
"""

from __future__ import annotations

import importlib
import json
import os
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import asdict
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, OffloadPolicy, fully_shard
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

import cotrain_compile
from bench.runtime.own_network import Loopback
from bench.runtime.rank_bench import RankBench, start
from cotrain_compile import files, presets
from cotrain_compile.analysis.costs import measured_costs
from cotrain_compile.capture.aten import prepare
from cotrain_compile.capture.aten.exchange_times import wait_late
from cotrain_compile.machine import Machine
from cotrain_compile.placement.placed import place_plan
from cotrain_compile.placement.problem import formulate
from cotrain_compile.placement.schedule import schedule as scheduling
from cotrain_compile.placement.simulate.predict import step_s
from cotrain_compile.plan import Lane, Timeline
from cotrain_compile.runtime.calibrate.link_bench import CpuBench, Sizes
from cotrain_compile.runtime.calibrate.network_bench import measured_network

RANKS, LAYERS, WIDTH, ROWS = 2, 6, 576, 512
WARM_UP = 3
PLANNED, AT_ONCE = "DDP, planned", "DDP, awaited at once"
SHARDED, SHARDED_AT_ONCE = "FSDP2, planned", "FSDP2, awaited at once"
# Each way that is compiled, with the one whose measured ops its prediction is made of.
COMPILED = {
    PLANNED: AT_ONCE,
    AT_ONCE: AT_ONCE,
    SHARDED: SHARDED_AT_ONCE,
    SHARDED_AT_ONCE: SHARDED_AT_ONCE,
}
Step = Callable[[Tensor], Any]


def net() -> nn.Sequential:
    """Layers of 1.3 MiB each, which go in no bucket."""
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(LAYERS)]
    return nn.Sequential(*layers)


def replicated() -> nn.Module:
    """Whole on every rank."""
    return DistributedDataParallel(net())


def sharded(offload: OffloadPolicy | None = None) -> nn.Module:
    """Layer by layer, as FSDP2's own examples do."""
    model, mesh = net(), init_device_mesh("cpu", (RANKS,))
    policy = offload or OffloadPolicy()
    for layer in model:
        fully_shard(layer, mesh=mesh, offload_policy=policy)
    wrapped: nn.Module = fully_shard(model, mesh=mesh, offload_policy=policy)
    return wrapped


def step_of(model: nn.Module) -> Step:
    """A training step of `model`, in eager."""
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)

    def step(x: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss = F.mse_loss(model(x), x)
        loss.backward()
        optimizer.step()
        return loss.detach()

    return step


def deepspeed_step() -> Step:
    """DeepSpeed's engine: gradients and states in parts, states and their update on the host."""
    rank = str(dist.get_rank())
    os.environ |= {
        "DS_ACCELERATOR": "cpu",
        "RANK": rank,
        "LOCAL_RANK": rank,
        "WORLD_SIZE": str(RANKS),
        "LOCAL_SIZE": str(RANKS),
    }
    deepspeed = importlib.import_module("deepspeed")
    deepspeed.init_distributed(dist_backend="gloo", auto_mpi_discovery=False)
    model = net()
    config = {
        "train_micro_batch_size_per_gpu": ROWS,
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,  # it has no SGD of its own
        "zero_optimization": {
            "stage": 2,
            "overlap_comm": True,
            "offload_optimizer": {"device": "cpu", "pin_memory": False},
        },
    }
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)

    def step(x: Tensor) -> Tensor:
        loss = F.mse_loss(engine(x), x)
        engine.backward(loss)
        engine.step()
        return loss.detach()

    return step


def compiled(model: nn.Module, machine: Path) -> Step:
    """Everything on the device; a copy over an emulated link would take the cores."""
    options = {"quiet": True, "policy": "resident", "poison": False, "machine": str(machine)}
    step: Step = torch.compile(step_of(model), backend="cotrain", options=options)
    return step


@contextmanager
def at_once() -> Iterator[None]:
    """Within it, every exchange is awaited where the trace awaits it."""
    others = tuple(each for each in prepare.PREPARATIONS if each is not wait_late)
    with (
        mock.patch.object(prepare, "PREPARATIONS", others),
        mock.patch.object(scheduling, "with_exchanges_ahead", lambda p, pl, tasks, moved: moved),
    ):
        yield


# What makes each step, and within what it is called for the first time.
Way = tuple[Callable[[], Step], Callable[[], AbstractContextManager[Any]]]


def ways(machine: Path) -> dict[str, Way]:
    """Every way to train, on a machine that knows the network."""
    return {
        "DDP, eager": (lambda: step_of(replicated()), nullcontext),
        PLANNED: (lambda: compiled(replicated(), machine), nullcontext),
        AT_ONCE: (lambda: compiled(replicated(), machine), at_once),
        "FSDP2, eager": (lambda: step_of(sharded()), nullcontext),
        "FSDP2 with CPU offload, eager": (
            lambda: step_of(sharded(CPUOffloadPolicy())),
            nullcontext,
        ),
        "DeepSpeed ZeRO-2 with CPU offload, eager": (deepspeed_step, nullcontext),
        SHARDED: (lambda: compiled(sharded(), machine), nullcontext),
        SHARDED_AT_ONCE: (lambda: compiled(sharded(), machine), at_once),
    }


def train(rank: int, folder: str, rate: str, rounds: int) -> None:
    """On one rank: seconds of every step, in turn in every way."""
    start(rank, RANKS, Path(folder, "store"))
    network = measured_network(
        CpuBench(1 << 30), torch.device("cpu"), Sizes(exchange_bytes=1 << 22)
    )
    machine = presets.find(presets.THIS_MACHINE).but(network=network)
    path = Path(folder, f"machine{rank}.json")
    files.save(machine, path)
    steps, failed = _first_steps(ways(path))
    seconds: dict[str, list[float]] = {way: [] for way in steps}
    timelines: dict[str, list[Timeline]] = {way: [] for way in COMPILED}
    for number in range(WARM_UP + rounds):
        for way, step in steps.items():
            taken = _timed(step)
            if number >= WARM_UP:
                seconds[way].append(taken)
                if way in timelines:
                    timelines[way].append(_measured(step))
    found = {
        "median_s": {way: statistics.median(taken) for way, taken in seconds.items()},
        "failed": failed,
        "network": asdict(network) if network else None,
        **_predicted(steps, timelines, machine),
    }
    if rank == 0:
        Path(folder, "found.json").write_text(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()


def _first_steps(of_way: Mapping[str, Way]) -> tuple[dict[str, Step], dict[str, str]]:
    """The steps, after their first one; and why there is none, by way."""
    steps: dict[str, Step] = {}
    failed: dict[str, str] = {}
    for way, (make, within) in of_way.items():
        try:
            with within():
                step = make()
                step(_batch())
        except (ImportError, RuntimeError, ValueError, NotImplementedError) as error:
            failed[way] = f"{type(error).__name__}: {str(error).splitlines()[0]}"
        else:
            steps[way] = step
    return steps, failed


def _timed(step: Step) -> float:
    x = _batch()
    dist.barrier()
    began = time.perf_counter()
    step(x)
    return time.perf_counter() - began


def _batch() -> Tensor:
    return torch.randn(ROWS, WIDTH)


def _measured(step: Step) -> Timeline:
    timeline = cotrain_compile.inspect(step).measured
    assert timeline is not None
    return timeline


def _predicted(
    steps: Mapping[str, Step], timelines: Mapping[str, Sequence[Timeline]], machine: Machine
) -> dict[str, Any]:
    """What the steps that are compiled take by their plans; and of DDP's, compute and network."""
    predicted: dict[str, float] = {}
    found: dict[str, Any] = {"predicted_s": predicted}
    for way, profiled in COMPILED.items():
        profile = measured_costs(timelines[profiled], cotrain_compile.inspect(steps[profiled]).plan)
        placed = cotrain_compile.inspect(steps[way])
        problem = formulate(placed.problem.dataflow, machine, placed.problem.budgets, profile)
        predicted[way] = step_s(place_plan(problem, placed.plan))
        if way == PLANNED:
            found["compute_s"] = sum(problem.costs.device_s.values())
            found["network_s"] = sum(problem.costs.network_s.values())
    return found | {
        "measured_s": {
            way: statistics.median(t.makespan_s for t in each) for way, each in timelines.items()
        },
        "hidden": statistics.median(map(_beside, timelines[PLANNED])),
    }


def _beside(timeline: Timeline) -> float:
    """The part of the exchanges' time in which the device was not waiting for one."""
    waited_s = sum(
        span.end_s - span.start_s
        for span in timeline.lane(Lane.DEVICE)
        if span.name.startswith("wait_tensor")
    )
    return 1 - waited_s / timeline.busy_s(Lane.NETWORK)


def table(result: Mapping[str, Any]) -> str:
    """For the page of results."""
    predicted = result["predicted_s"]
    lines = ["| way | step (median) | predicted |", "|---|---|---|"]
    for way, taken in result["median_s"].items():
        told = f"{1e3 * predicted[way]:.0f} ms" if way in predicted else ""
        lines.append(f"| {way} | {1e3 * taken:.0f} ms | {told} |")
    lines += [f"| {way} | does not run: {why} | |" for way, why in result["failed"].items()]
    return "\n".join(lines) + (
        f"\n\nOf a step {1e3 * result['compute_s']:.0f} ms are compute and "
        f"{1e3 * result['network_s']:.0f} ms the network's (DDP), of which the planned step waits "
        f"for {1 - result['hidden']:.0%}. Planned steps keep everything on the device here; "
        "DeepSpeed has its states on the host."
    )


def collected(folder: Path) -> dict[str, Any]:
    """What rank 0 has found."""
    found: dict[str, Any] = json.loads((folder / "found.json").read_text())
    return found


BENCH = RankBench(
    "bench.runtime.several_ranks",
    __doc__ or "",
    ((train, RANKS),),
    network=lambda rate: Loopback(rate).made,
    rate="1gbit",
    rounds=15,
    collected=collected,
    table=table,
)
main: Callable[..., None] = BENCH.main

if __name__ == "__main__":
    main()

"""Runs of stages: GPipe, 1F1B and swapped stages of two ranks, and what their plans say.

By GPipe and 1F1B with everything on the device, by 1F1B within a budget that does not hold a stage,
and by Harmony's swapped stages, two on each rank, with and without those of the next turns ahead.
Turns sleep for what their layers take, copies take what a link of 7 MB/s says. Turns within a
budget do not sleep: what they take are their copies.

What a step is predicted to take is what the cluster planner simulates of these seconds, and of
turns within a budget what their own plans predict.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.nn import functional as F

import cotrain_compile
from bench.runtime.rank_bench import compared
from bench.runtime.slow_model import (
    BACKWARD_S,
    FORWARD_S,
    LAYERS,
    ROW_BYTES,
    ROWS,
    WIDTH,
    Model,
    profile,
    slowed,
)
from cotrain_compile import files, presets
from cotrain_compile.cluster.model.layout import StagePlan
from cotrain_compile.cluster.pipeline.cuts import PipelineOrder
from cotrain_compile.cluster.pipeline.step import Stage, StagesInOrder, pipeline_step
from cotrain_compile.cluster.steps.stage_step import Does, Rank
from cotrain_compile.cluster.swapped.packs import Pack, PackCosts
from cotrain_compile.cluster.swapped.turn_step import StagesInTurn
from cotrain_compile.machine import Link, Network, Tier
from cotrain_compile.pipelining.memory import beside_swapped
from cotrain_compile.pipelining.turns import Turns
from cotrain_compile.plan import Timeline

RANKS, MICRO_BATCHES = 2, 8
HOP_BYTES = ROWS * ROW_BYTES
LINK = Link(7e6, 250e-6)
BUDGET_BYTES = 3_000_000
# Turns take what they are made to take: of the planner's machine only links and network count.
ANY_MACHINE = presets.find("rtx4090")


@dataclass(frozen=True)
class Case:
    """Stages that begin at these layers, and the options beside those of all."""

    name: str
    schedule: str
    layers: tuple[int, ...]
    options: Mapping[str, Any]
    swapped: bool = False
    ahead: bool = False

    @property
    def plan(self) -> StagePlan:
        """For `cotrain_compile.pipeline`."""
        points = tuple(f"layers.{layer}" for layer in self.layers)
        return StagePlan(
            self.schedule, points, MICRO_BATCHES, ROWS, swapped=self.swapped, ahead=self.ahead
        )

    @property
    def stages(self) -> int:
        """On all ranks."""
        return len(self.layers) + 1


RESIDENT = {"policy": "resident"}
TIGHT = {"memory_budget": BUDGET_BYTES, "work_limit": 2.0}
CASES = (
    Case("GPipe", "GPipe", (4,), RESIDENT),
    Case("1F1B", "1F1B", (4,), RESIDENT),
    Case("1F1B in a budget", "1F1B", (4,), TIGHT),
    Case("swapped stages", "LoopedBFS", (2, 4, 6), RESIDENT, swapped=True),
    Case("swapped stages, ahead", "LoopedBFS", (2, 4, 6), RESIDENT, swapped=True, ahead=True),
)


class Run:
    """The training of a case on this rank, and what its steps took."""

    def __init__(self, case: Case, machine: Path) -> None:
        torch.manual_seed(0)
        self.case, self.model = case, Model()
        options: dict[str, Any] = {
            "quiet": True,
            "poison": False,
            "machine": str(machine),
            "throttle": True,
            **case.options,
        }
        self.x = torch.randn(MICRO_BATCHES * ROWS, WIDTH)
        self.pipe = cotrain_compile.pipeline(
            self.model, case.plan, F.mse_loss, (self.x,), self.x, options=options
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
            "peaks": self._peaks(),
            "sent_bytes": sum(stage.sent_bytes for stage in self.pipe.stages) // self.steps,
            "fetched_bytes": swaps.fetched_bytes // self.steps if swaps else 0,
            "home_bytes": swaps.sent_bytes // self.steps if swaps else 0,
        }

    def _peaks(self) -> list[tuple[int, int]]:
        """Of each turn and the update: planned and metered, with other stages that are there."""
        found = [_peaks_of(self.update)]
        sizes = [
            sum(param.nbytes for param in stage.turns.part.module.parameters())
            for stage in self.pipe.stages
        ]
        beside = beside_swapped(sizes, sizes)
        for number, stage in enumerate(self.pipe.stages):
            for function in stage.turns.functions:
                planned, metered = _peaks_of(function)
                if self.case.ahead and self.pipe.memory.swaps is not None:
                    backward = function is stage.turns.functions[-1]
                    planned += (beside.backward if backward else beside.forward)[number]
                    metered += self.pipe.memory.swaps.beside_bytes[number, backward]
                found.append((planned, metered))
        return found


def made(machine: Path) -> list[Run]:
    """All cases, on this computer with slow links, which is written to `machine`."""
    slow = presets.find(presets.THIS_MACHINE).but(h2d=LINK, d2h=LINK, duplex=2.0)
    files.save(slow, machine)
    return [Run(case, machine) for case in CASES]


def throttle(turns: Turns, layers: int) -> None:
    """Let turns of a stage with so many layers take what these do; all run their forward, too."""
    for name, layer_s in (
        ("_forward", FORWARD_S),
        ("_backward", FORWARD_S + BACKWARD_S),
        ("_whole", FORWARD_S + BACKWARD_S),
    ):
        setattr(turns, name, slowed(getattr(turns, name), layers * layer_s))


def _measured(function: Callable[..., Any]) -> Timeline:
    timeline = cotrain_compile.inspect(function).measured
    assert timeline is not None
    return timeline


def _peaks_of(function: Callable[..., Any]) -> tuple[int, int]:
    planned = cotrain_compile.inspect(function).plan.predicted.peak_bytes[Tier.DEVICE]
    return planned, _measured(function).peak_bytes[Tier.DEVICE]


def record(case: Case, ranks: Sequence[Mapping[str, Any]], hop: Network) -> dict[str, Any]:
    """A case with what each rank has found, beside what was planned."""
    if case.swapped:
        predicted_s, moved = _swapped(case, hop)
    else:
        budgeted = "memory_budget" in case.options
        turn_s = [of_rank["turn_s"] for of_rank in ranks] if budgeted else _throttled(4)
        predicted_s, moved = _resident(case, turn_s, hop)
    peaks = [peak for of_rank in ranks for peak in of_rank["peaks"]]
    return {
        **compared(case.name, predicted_s, ranks, moved, hop),
        "peak_error": max(abs(planned - metered) / max(metered, 1) for planned, metered in peaks),
        "peak_bytes": max(metered for _, metered in peaks),
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
    stages = StagesInOrder(
        [Rank(ANY_MACHINE.but(network=hop), f"device{rank}") for rank in range(RANKS)],
        [Stage(forward_s, backward_s, HOP_BYTES), Stage(whole_s, 0.0)],
        PipelineOrder(case.schedule.lower()),
        MICRO_BATCHES,
    )
    return pipeline_step(stages).seconds, {"sent": [MICRO_BATCHES * HOP_BYTES] * RANKS}


def _swapped(case: Case, hop: Network) -> tuple[float, dict[str, list[int]]]:
    """The planner's stages in turn, with what each rank moves."""
    costs = PackCosts(profile(LAYERS // case.stages))
    stage_bytes = costs.layers[0].param_bytes
    copies = 2 * LAYERS // 4  # weight and bias of each layer
    link = Link(1 / (1 / LINK.bytes_per_s + copies * LINK.latency_s / stage_bytes))
    peers = Network(1 / (1 / hop.bytes_per_s + hop.latency_s / HOP_BYTES))
    machine = ANY_MACHINE.but(h2d=link, d2h=link, network=peers)
    packs = tuple(Pack(k, k + 1) for k in range(4))
    plan = StagesInTurn(costs, machine, RANKS, packs, ROWS, MICRO_BATCHES, case.ahead)
    planned = {
        "sent": [3 * MICRO_BATCHES * HOP_BYTES] * RANKS,
        "fetched": [3 * stage_bytes] * RANKS,
        "home": [2 * stage_bytes] * RANKS,
    }
    ways = (Does.SEND, Does.FETCH, Does.STORE)
    for (name, of_ranks), way in zip(planned.items(), ways, strict=True):
        assert sum(of_ranks) == plan.step.moved_bytes[way], name
    return plan.step.seconds, planned

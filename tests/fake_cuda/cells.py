"""Cells of the matrix: a training on the card that is not there, all the way to its segments.

A `Cell` in, a `Result` out: traced, planned, checked, rewritten, cut, and looked at. Dynamo's graph
does not name the kernel of attention, so cells that differ in that and in their policy share it.
"""

from __future__ import annotations

import itertools
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any
from unittest import mock

import torch
from torch import fx

from cotrain_compile import capture
from cotrain_compile.backends.inductor.lower import segments_of
from cotrain_compile.capture.aten.aot import to_aten
from cotrain_compile.capture.offline.only_trace import Traced
from cotrain_compile.dataflow import Dataflow, Phase, Role
from cotrain_compile.entry.tracing import trace_graph
from cotrain_compile.errors import PlacementError
from cotrain_compile.extract.extract import extract
from cotrain_compile.graph import StepGraph, writes
from cotrain_compile.machine import MEMORIES, Tier
from cotrain_compile.passes import run_passes
from cotrain_compile.passes.split_ops import split_ops
from cotrain_compile.placement.check.check import check
from cotrain_compile.placement.policies import streamed
from cotrain_compile.placement.problem import Problem, formulate
from cotrain_compile.placement.recompute.recomputable import recomputable
from cotrain_compile.placement.recompute.rewrite import recomputed_ops
from cotrain_compile.placement.schedule.schedule import schedule
from cotrain_compile.placement.search.solve import SolveSettings, solve
from cotrain_compile.placement.split import split_regions
from cotrain_compile.plan import Plan
from cotrain_compile.presets import find
from cotrain_compile.runtime.host.kernels import host_kernels
from tests.fake_cuda.card import choose_attention, there
from tests.fake_cuda.trainings import (
    CARD,
    HEADS,
    TOKENS,
    WIDTH,
    Job,
    every_optimizer_job,
    flex_job,
    job,
    llama_job,
    package_job,
    readme_job,
)

aten = torch.ops.aten

ATTENTION_OPS = {
    "flash": aten._scaled_dot_product_flash_attention.default,
    "efficient": aten._scaled_dot_product_efficient_attention.default,
    "cudnn": aten._scaled_dot_product_cudnn_attention.default,
}
# With attention by FlashAttention's own package.
PACKAGED = {"flash package": "", "flash package, packed": "_varlen"}
LLAMA_PACKAGED = "llama, flash_attention_2"
AGAIN = "streamed, all made again"  # all values that can be, beside what `streamed` says
IN_PARTS = "streamed, in parts"  # every region in two, beside what `streamed` says
SHARE = 0.6  # of what the resident step needs, for "auto"


@dataclass(frozen=True)
class Cell:
    """One training and how it is placed; `training` is "matrix" or a step of its own."""

    optimizer: str = "AdamW"
    precision: str = "bfloat16 autocast"
    attention: str = "flash"
    policy: str = "zero-offload"
    micro_batches: int = 1
    training: str = "matrix"
    checkpointed: str = ""  # by a checkpoint of torch's of that kind
    checkpoints: str = "respect"
    dropout: float = 0.0  # of attention
    machine: str = "h100"

    @property
    def name(self) -> str:
        again = [f"{self.checkpointed} checkpoint", self.checkpoints] if self.checkpointed else []
        if self.training != "matrix":
            return ", ".join((self.training, self.machine, *again, self.policy))
        batches = f"{self.micro_batches} micro-batches"
        told = (self.optimizer, self.precision, self.attention, batches, *again, self.policy)
        return ", ".join((*told, f"dropout {self.dropout}") if self.dropout else told)


@dataclass(frozen=True)
class Result:
    """What came of a cell: nothing in `error` where all went well."""

    name: str
    error: str = ""
    fingerprint: str = ""
    ops: int = 0
    tasks: int = 0
    segments: int = 0
    again: int = 0  # ops of the placed graph that run a second time


def run(cells: Sequence[Cell]) -> Iterator[Result]:
    """Take each cell as far as it goes. Neighbours of one training are traced together."""
    for training, same in itertools.groupby(cells, lambda c: replace(c, attention="", policy="")):
        asked = list(same)
        traces = traced(training, list(dict.fromkeys(cell.attention for cell in asked)))
        yield from (run_cell(cell, traces[cell.attention]) for cell in asked)


def run_cell(cell: Cell, step: StepGraph | Exception) -> Result:
    """Plan the step, rewrite it, cut it, and look at what there is after each."""
    if isinstance(step, Exception):
        return Result(cell.name, _told(step))
    try:
        _look_at_trace(step, cell)
        dataflow = extract(step)
        if cell.training in (*PACKAGED, LLAMA_PACKAGED):
            _look_at_package(dataflow, PACKAGED.get(cell.training, ""))
        plan = planned(dataflow, cell)
        _look_at_parts(step, dataflow, plan)
        placed = run_passes(step, plan)
        host_kernels(placed, "fused")
        cut = segments_of(step, placed, dataflow)
        _look_at_segments(cut.segments)
    except Exception as error:
        return Result(cell.name, _told(error))
    copies = set(recomputed_ops(dataflow, plan.placement.recomputed).values())
    again = sum(node.name in copies for node in placed.module.graph.nodes)
    counts = (len(dataflow.ops), len(plan.tasks), len(cut.segments), again)
    return Result(cell.name, "", step.fingerprint, *counts)


def _told(error: Exception) -> str:
    where = "".join(traceback.format_tb(error.__traceback__)[-3:])
    return f"{type(error).__name__}: {error}\n{where}"


def job_of(cell: Cell) -> Job:
    """The step of a cell and its arguments."""
    if cell.training == "every optimizer":
        return every_optimizer_job()
    if cell.training == "readme":
        return readme_job()
    if cell.training == "flex":
        return flex_job()
    if cell.training in PACKAGED:
        return package_job(packed="packed" in cell.training)
    if cell.training == "llama":
        return llama_job(cell.optimizer, cell.checkpointed)
    if cell.training == LLAMA_PACKAGED:
        return llama_job(cell.optimizer, cell.checkpointed, "flash_attention_2")
    return job(
        cell.optimizer,
        cell.precision,
        micro_batches=cell.micro_batches,
        checkpointed=cell.checkpointed,
        dropout=cell.dropout,
    )


def traced(cell: Cell, kernels: Sequence[str]) -> Mapping[str, StepGraph | Exception]:
    """The step of a cell with each of these kernels of attention, or why there is none.

    Dynamo traces it once; its graph is lowered to ATen, where the kernel is chosen, once for each.
    """
    found: dict[str, StepGraph | Exception] = {}

    def lower_for_each(*arguments: Any) -> Callable[..., Any]:
        for kernel in kernels:
            choose_attention(kernel)
            try:
                to_aten(*arguments)
            except Exception as error:
                found[kernel] = error.step if isinstance(error, Traced) else error
                last = error
        raise last

    torch._dynamo.reset()
    with there(), mock.patch.object(capture, "to_aten", lower_for_each):
        try:
            trace_graph(lambda: job_of(cell), checkpoints=cell.checkpoints)
        except Exception as error:
            return found or dict.fromkeys(kernels, error)
    return found


def planned(dataflow: Dataflow, cell: Cell) -> Plan:
    """A plan for the machine, or for `SHARE` of what the step needs, or the least it can do."""
    machine = find(cell.machine)
    plenty = dict.fromkeys(MEMORIES, 1 << 40)
    problem = formulate(dataflow, machine, plenty)
    # To look for what can be made again takes longest: it is done for one kernel of attention.
    again = cell.training != "matrix" or cell.attention == "efficient"
    settings = SolveSettings(policy=cell.policy, work_limit=2.0, recompute=again)
    if cell.policy == IN_PARTS:
        assert dataflow.regions, "nothing may run in parts"
        splits = {region.name: 2 for region in dataflow.regions}
        found = schedule(problem, replace(streamed(dataflow), splits=splits))
        check(problem, found)
        return found
    if cell.policy == AGAIN:
        names = tuple(sorted(recomputable(dataflow)))
        assert names, "nothing can be made again"
        placement = replace(streamed(dataflow), recomputed=names)
        found = schedule(problem, placement)
        check(problem, found)
        return found
    if cell.policy == "auto":
        whole = solve(problem, SolveSettings(policy="resident")).predicted.peak_bytes[Tier.DEVICE]
        tight = problem.with_budget(Tier.DEVICE, int(SHARE * whole))
        try:
            return _checked(tight, settings)
        except PlacementError as refusal:  # what it says is missing has to be enough
            enough = tight.budgets[Tier.DEVICE] + refusal.shortfall_bytes
            return _checked(problem.with_budget(Tier.DEVICE, enough), settings)
    return _checked(problem, settings)


def _checked(problem: Problem, settings: SolveSettings) -> Plan:
    plan = solve(problem, settings)
    check(problem, plan)
    return plan


def _look_at_trace(step: StepGraph, cell: Cell) -> None:
    """What a step on a card has: everything on it, its attention, every parameter updated."""
    nodes = step.module.graph.find_nodes(op="placeholder")
    values = {item.name: node.meta["val"] for node, item in zip(nodes, step.inputs, strict=True)}
    elsewhere = [n for n, v in values.items() if _is_tensor(v) and v.device.type != CARD]
    assert not elsewhere, f"not on the card: {elsewhere}"
    params = {
        item.node
        for item in step.inputs
        if item.role is Role.PARAM and (item.name in step.rules or cell.training == "matrix")
    }
    assert params, "nothing is trained"
    written = {destination.name for _, destination, _ in writes(step.module.graph)}
    assert params <= written, f"not updated: {sorted(params - written)}"
    if cell.training in ("matrix", "llama"):
        _look_at_attention(step, cell)


def _look_at_attention(step: StepGraph, cell: Cell) -> None:
    targets = [node.target for node in step.nodes]
    found = {name for name, op in ATTENTION_OPS.items() if op in targets}
    assert found == {cell.attention} - {"math"}, f"attention by {found or 'math'}"
    if found:
        forwards = targets.count(ATTENTION_OPS[cell.attention])
        again = cell.checkpointed and cell.checkpoints == "respect" and not cell.dropout
        assert forwards == cell.micro_batches * (2 if again else 1), f"{forwards} times attention"
    low = {"float32": torch.float32, "float16 scaled": torch.float16}
    expected = low.get(cell.precision, torch.bfloat16)
    # Muon and Adafactor have products of their own, in the dtype of their states.
    products = [
        node
        for node in step.nodes
        if node.target is aten.mm.default and step.phases.get(node.name) is not Phase.OPTIMIZER
    ]
    other = [node.name for node in products if node.meta["val"].dtype != expected]
    assert products, "no product of matrices"
    assert not other, f"not {expected}: {other}"


def _look_at_package(dataflow: Dataflow, kind: str) -> None:
    """Two causal sequences of `TOKENS`, heads that share a key: flops, and what the backward takes.

    It sums the gradient of the query in float32, and has gradients of key and value for each head.
    """
    ops = {op.target: op for op in dataflow.ops if op.target.startswith("flash_attn.")}
    forward = ops.pop(f"flash_attn._flash_attn{kind}_forward.default")
    backward = ops.pop(f"flash_attn._flash_attn{kind}_backward.default")
    assert not ops, f"also by {list(ops)}"
    pairs = 2 * HEADS * TOKENS * (TOKENS + 1) // 2
    assert forward.flops == 4 * pairs * (WIDTH // HEADS), forward.flops
    assert backward.flops == 10 * pairs * (WIDTH // HEADS), backward.flops
    (scratch,) = (b for b in dataflow.buffers if b.role is Role.WORKSPACE)
    assert scratch.name in backward.writes
    elements = 2 * TOKENS * WIDTH
    assert scratch.nbytes == elements * 4 + 2 * elements * 2, scratch.nbytes


def _look_at_parts(step: StepGraph, dataflow: Dataflow, plan: Plan) -> None:
    """The graph in parts is, as data, what the data in parts is; also what a kernel takes aside."""
    if plan.placement.splits:
        found = extract(split_ops(step.copy(), plan).verify())
        expected = split_regions(dataflow, plan.placement.splits)
        assert [op for op in found.ops if op.writes] == [op for op in expected.ops if op.writes]
        assert found.buffer == expected.buffer


def _look_at_segments(segments: Any) -> None:
    """Segments are pure but for their writes at the end, and each holds tensors of one device."""
    assert segments
    for segment in segments.values():
        devices = {v.device.type for v in segment.inputs if _is_tensor(v) and v.dim()}
        assert len(devices) <= 1, f"{segment.name} reads from {devices}"
        graph: fx.Graph = segment.module.graph
        graph.lint()


def _is_tensor(value: object) -> bool:
    return isinstance(value, torch.Tensor)

"""The stages of one compilation, timed one after the other in this process.

In: how many layers a Llama of 7B's width has. Out: seconds of every stage, how many functions it
calls, nodes, and how much memory the process has taken. Nothing of the model is allocated: it is
traced under fake tensors.
"""

from __future__ import annotations

import cProfile
import multiprocessing
import pstats
import resource
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from types import FrameType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

import cotrain_compile
from bench.compiler.processor import processor_s
from cotrain_compile import presets
from cotrain_compile.analysis.costs import roofline
from cotrain_compile.analysis.liveness import liveness
from cotrain_compile.analysis.reuse import critical_path_s, reuse_distances
from cotrain_compile.backends.inductor import lower
from cotrain_compile.backends.inductor.segments import SegmentedStep
from cotrain_compile.demo.job import CharacterGPT, Shape
from cotrain_compile.entry.tracing import trace_graph
from cotrain_compile.errors import PlacementError
from cotrain_compile.extract.extract import extract
from cotrain_compile.graph import StepGraph
from cotrain_compile.machine import MEMORIES, Tier
from cotrain_compile.passes import run_passes
from cotrain_compile.placement.check.check import check
from cotrain_compile.placement.decisions.decisions import DecisionSpace
from cotrain_compile.placement.decisions.find_decisions import decision_space
from cotrain_compile.placement.explain.explain import explain
from cotrain_compile.placement.placed import place_plan
from cotrain_compile.placement.policies import rule
from cotrain_compile.placement.problem import Problem, formulate
from cotrain_compile.placement.schedule.schedule import Draft, draft, finished, schedule
from cotrain_compile.placement.search.greedy import greedy
from cotrain_compile.placement.search.solve import SolveSettings, solve
from cotrain_compile.placement.simulate.engine import Periodic
from cotrain_compile.placement.simulate.predict import predict_steady_state
from cotrain_compile.plan import Plan
from cotrain_compile.runtime.host.kernels import host_kernels
from cotrain_compile.runtime.ops import TASKS
from cotrain_compile.support.collector import collector_off

BUDGET_SHARE = 0.5
"""What the device may take of the peak with everything resident."""
TIME_LIMIT_S = 5.0
STEPS, ROUNDS = 3, 3
MOST_LAYERS_COUNTED = 24
"""Calls are counted up to this depth: to count them each stage runs once more, much slower."""
UNCOUNTED = (
    "capture",
    "explain a parameter",
    "solve, with integer programs",
    "compile, nothing moved",
)
DEPTHS_COMPILED = (6, 24)
"""Numbers of layers at which Inductor compiles: there are as many kinds of segments at all."""


def llama(layers: int) -> Callable[[], tuple[Callable[[Tensor], Tensor], tuple[Tensor]]]:
    """A job: the training step of a Llama of 7B's width, AdamW with clipping."""

    def build() -> tuple[Callable[[Tensor], Tensor], tuple[Tensor]]:
        model = LlamaForCausalLM(
            LlamaConfig(
                hidden_size=4096,
                intermediate_size=11008,
                num_hidden_layers=layers,
                num_attention_heads=32,
                vocab_size=32000,
                use_cache=False,
            )
        )
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)

        def step(tokens: Tensor) -> Tensor:
            optimizer.zero_grad()
            logits = model(input_ids=tokens).logits
            loss = F.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            return loss

        return step, (torch.randint(0, 32000, (1, 2048)),)

    return build


@dataclass
class Stages:
    """Runs work and notes its seconds; `profiled` names the stage whose profile is printed.

    Where `counts` is set the work runs once more, and its `calls` are counted.
    """

    profiled: str = ""
    counts: bool = False
    seconds: dict[str, float] = field(default_factory=dict)
    calls: dict[str, int] = field(default_factory=dict)

    def __call__(self, stage: str, work: Callable[[], Any]) -> Any:
        """What `work` returns."""
        profile = cProfile.Profile() if stage == self.profiled else None
        began_s = processor_s()
        result = profile.runcall(work) if profile else work()
        self.seconds[stage] = processor_s() - began_s
        print(f"{stage:30}{self.seconds[stage]:8.2f} s", file=sys.stderr, flush=True)
        if profile:
            pstats.Stats(profile).sort_stats("tottime").print_stats(30)
        if self.counts and stage not in UNCOUNTED:
            self.calls[stage] = _calls_in(work)
        return result


def _calls_in(work: Callable[[], Any]) -> int:
    """How many functions `work` calls; in a copy of this process, whose memory is measured."""
    forked = multiprocessing.get_context("fork")
    found = forked.SimpleQueue()
    copy = forked.Process(target=lambda: found.put(_counted(work)))
    copy.start()
    copy.join()
    assert copy.exitcode == 0, "what ran once failed in a copy of the process"
    return int(found.get())


def _counted(work: Callable[[], Any]) -> int:
    """How many functions `work` calls, those written in C included."""
    count = 0

    def note(frame: FrameType, event: str, argument: Any) -> None:
        nonlocal count
        count += event in ("call", "c_call")

    sys.setprofile(note)
    try:
        work()
    finally:
        sys.setprofile(None)
    return count


def stages_of(layers: int, profiled: str = "") -> Mapping[str, Any]:
    """Every stage is run once, rewriting and cutting on two plans.

    One is the greedy's, with updates on the device; the other has every update on the host.
    """
    before_bytes = _most_bytes()
    timed = Stages(profiled, counts=layers <= MOST_LAYERS_COUNTED)
    step: StepGraph = timed("capture", lambda: trace_graph(llama(layers)))
    captured_bytes = _most_bytes()
    with collector_off():  # as it is while a step is placed
        found, resident = _placed(timed, step)
    if layers in DEPTHS_COMPILED:
        timed("compile, nothing moved", lambda: lower._compile_each_kind(resident.segments, {}))
    found["process_bytes"] |= {
        "imports": before_bytes,
        "capture": captured_bytes,
        "all": _most_bytes(),
    }
    return {"nodes": len(step.nodes), "seconds": timed.seconds, "calls": timed.calls, **found}


def _placed(timed: Stages, step: StepGraph) -> tuple[dict[str, Any], SegmentedStep]:
    """What all but capturing and compiling gives, and the segments where nothing moves."""
    dataflow = timed("extract", lambda: extract(step))
    problem = _analysed(timed, dataflow)
    plan = _planned(timed, problem)
    placed = timed("rewrite", lambda: run_passes(step, plan))
    whole = timed("cut into segments", lambda: lower.segments_of(step, placed, dataflow))
    _updated_on_the_host(timed, step, problem)
    planned_bytes = _most_bytes()
    settings = SolveSettings(work_limit=TIME_LIMIT_S)
    solved = timed("solve, with integer programs", lambda: solve(problem, settings))
    resident = lower.segments_of(step, step, dataflow)
    found = {
        "tasks": len(plan.tasks),
        "process_bytes": {"up to segments": planned_bytes},
        "segments": {"resident": len(resident.segments), "placed": len(whole.segments)},
        "kinds": {
            "resident": len({s.key for s in resident.segments.values()}),
            "placed": len({s.key for s in whole.segments.values()}),
        },
        "step_s": {"greedy": plan.predicted.makespan_s, "auto": solved.predicted.makespan_s},
    }
    return found, resident


def _analysed(timed: Stages, dataflow: Any) -> Problem:
    machine = presets.find("h200")
    times = timed("roofline", lambda: roofline(dataflow, machine)).device_s
    alive = timed("liveness", lambda: liveness(dataflow))
    timed("reuse", lambda: reuse_distances(dataflow, times))
    timed("critical path", lambda: critical_path_s(dataflow, times))
    budgets = {Tier.DEVICE: int(BUDGET_SHARE * alive.peak_bytes), Tier.HOST: 1 << 44}
    return formulate(dataflow, machine, budgets)


def _planned(timed: Stages, problem: Problem) -> Plan:
    space: DecisionSpace = timed("find choices", lambda: decision_space(problem))
    found = _scheduled(timed, problem, space)
    plan: Plan = timed("simulate", lambda: finished(problem, found))
    timed("simulate many steps", lambda: _many_steps(problem, plan))
    timed("check", lambda: check(problem, plan))
    param = problem.dataflow.updates[0].param
    timed("explain a parameter", lambda: explain(problem, plan, param))
    return plan


def _scheduled(timed: Stages, problem: Problem, space: DecisionSpace) -> Draft:
    """The greedy's decisions, aimed lower by what is missing until they fit."""
    aim = float(problem.budgets[Tier.DEVICE])
    while True:
        decisions = timed("greedy", partial(greedy, space, aim))
        placement = space.placement("greedy", decisions)
        try:
            found: Draft = timed("schedule", partial(draft, problem, placement))
        except PlacementError as error:
            aim -= 1.05 * error.shortfall_bytes
        else:
            return found


def _updated_on_the_host(timed: Stages, step: StepGraph, problem: Problem) -> None:
    placement = rule("zero-offload")(problem.dataflow)
    roomy = replace(problem, budgets=dict.fromkeys(MEMORIES, 1 << 44))
    plan = timed("schedule, updates on the host", lambda: schedule(roomy, placement))
    placed = timed("rewrite, updates on the host", lambda: run_passes(step, plan))
    timed("host kernels", lambda: host_kernels(placed, "captured"))


def _many_steps(problem: Problem, plan: Plan) -> Periodic:
    return predict_steady_state(place_plan(problem, plan))


def _most_bytes() -> int:
    """The most memory that this process has had resident; Linux counts in KiB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def step_overhead(layers: int) -> Mapping[str, Any]:
    """Seconds of a step of a GPT of width 8, all threads together: next to no computing."""
    torch.set_num_threads(1)
    found: dict[str, Any] = {}
    for name, options in (
        ("resident", {"policy": "resident"}),
        ("updates on the host", {"policy": "coarse"}),
    ):
        step, batch = _tiny_step(layers, {"quiet": True, "poison": False, **options})
        step(batch)
        placed = cotrain_compile.inspect(step)
        ops = [n for n in placed.graph.nodes if n.op == "call_function" and n.target not in TASKS]
        best_s = min(_seconds_a_step(lambda: step(batch)) for _ in range(ROUNDS))  # noqa: B023
        found[name] = {"ops": len(ops), "tasks": len(placed.plan.tasks), "step_s": best_s}
    return found


def _tiny_step(
    layers: int, options: Mapping[str, Any]
) -> tuple[Callable[[Tensor], Tensor], Tensor]:
    torch.manual_seed(0)
    model = CharacterGPT(Shape(characters=16, context=8, width=8, layers=layers, heads=2))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    def step(characters: Tensor) -> Tensor:
        optimizer.zero_grad()
        logits = model(characters[:, :-1])
        loss = F.cross_entropy(logits.flatten(0, 1), characters[:, 1:].flatten())
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        return loss

    return torch.compile(step, backend="cotrain", options=options), torch.randint(16, (1, 9))


def _seconds_a_step(run: Callable[[], object]) -> float:
    began_s = processor_s()
    for _ in range(STEPS):
        run()
    return (processor_s() - began_s) / STEPS

"""Updates of a layer at one place on the device: each gets what it needs first."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from cotrain_compile import files
from cotrain_compile.dataflow import Dataflow
from cotrain_compile.machine import MEMORIES
from cotrain_compile.placement.check.check import check
from cotrain_compile.placement.policies import streamed
from cotrain_compile.placement.problem import formulate
from cotrain_compile.placement.schedule.list_scheduler import Tactics
from cotrain_compile.placement.schedule.schedule import draft, finished
from cotrain_compile.plan import Transfer
from cotrain_compile.presets import find

GPT = Path(__file__).parents[2] / "problems" / "gpt.json"


def test_gradients_that_were_away_are_back_before_the_updates_of_their_layer() -> None:
    step = files.load(GPT, Dataflow)
    problem = formulate(step, find("rtx4090"), dict.fromkeys(MEMORIES, 1 << 50))
    offloaded = tuple(sorted({group.gradient for group in step.updates}))
    placement = replace(streamed(step), offloaded=offloaded)
    layered = draft(problem, placement, tactics=Tactics(by_layer=True))
    copies = [task for task in layered.tasks if isinstance(task, Transfer)]
    assert set(offloaded) < {copy.buffer for copy in copies if copy.direction == "prefetch"}
    check(problem, finished(problem, layered, compiled=False))

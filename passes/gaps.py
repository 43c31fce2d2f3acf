"""Gaps: the places between the ops of a step, where the tasks of a plan go.

A gap is named by the op behind it: what goes into it is inserted before that op.
"""

from __future__ import annotations

from torch import fx

from cotrain_compile.graph import StepGraph


class Gaps:
    """The gaps of a step graph, by the op before and by the op behind each."""

    def __init__(self, step: StepGraph) -> None:
        # Views that a pass has made again have no phase, and are no ops of the plan.
        ops = [node for node in step.nodes if node.name in step.phases]
        end = next(node for node in step.nodes if node.op == "output")
        names = [op.name for op in ops]
        self._after = dict(zip([None, *names], [*ops, end], strict=True))
        self._before = dict(zip([None, *names], [end, *ops], strict=True))

    def after(self, op: str | None) -> fx.Node:
        """The gap after `op`, None: the first one."""
        return self._after[op]

    def before(self, op: str | None) -> fx.Node:
        """The gap before `op`, None: the last one."""
        return self._before[op]

"""Ordered: does a step in another order compute what it computed?

In: the Dataflow of a step, and the one in which its ops come in another order. Out: nothing, or
`PlanError`. Each op must find every buffer that it reads or writes as the same op has left it, the
state of a generator and the order of exchanges among them. Written without the code that orders.
"""

from __future__ import annotations

from collections.abc import Mapping

from cotrain_compile.dataflow import Dataflow
from cotrain_compile.errors import PlanError


def check_ordered(step: Dataflow, ordered: Dataflow) -> None:
    """Raise `PlanError` unless `ordered` has the ops of `step`, each with what it has there."""
    expected, found = _left_by(step), _left_by(ordered)
    for op in step.ops:
        if op.name not in found or ordered.ops[ordered.position[op.name]] != op:
            raise PlanError(f"unsound plan: op {op.name} is lost where micro-batches run by layer")
        for name, writer in expected[op.name].items():
            if found[op.name][name] != writer:
                raise PlanError(
                    f"unsound plan: where micro-batches run by layer, op {op.name} finds {name} as "
                    f"{found[op.name][name] or 'the step before'} has left it, not as "
                    f"{writer or 'the step before'} has"
                )
    if len(ordered.ops) != len(step.ops):
        raise PlanError("unsound plan: an op runs twice where micro-batches run by layer")


def _left_by(dataflow: Dataflow) -> Mapping[str, Mapping[str, str]]:
    """By op, which op wrote each buffer last that it touches; "" for none of the step."""
    writer: dict[str, str] = {}
    found = {}
    for op in dataflow.ops:
        found[op.name] = {name: writer.get(name, "") for name in (*op.reads, *op.writes)}
        writer.update(dict.fromkeys(op.writes, op.name))
    return found

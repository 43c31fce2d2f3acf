"""What a checkpointed function adds to a list or dictionary of the step, as a mixture of experts
does with what its loss for balance needs.

In eager the function runs again in the backward, and adds once more. A trace runs it once, which is
the same as long as nobody reads the list behind `backward()`: that is refused, and so is what was
there before the step. A reentrant checkpoint adds tensors without gradients, and stays refused.

Private torch API used: `CheckpointHigherOrderVariable._call_function`,
`SideEffects.check_allowed_side_effect`, `.id_to_variable` and `.store_attr_mutations`,
`SubgraphTracer.traced_with_externally_visible_side_effects`,
`bytecode_analysis.livevars_analysis`, `current_scope_id`. Reason: they
decide what a checkpoint may change, return it from there, and say what is read later. Tried on
torch 2.11.0 and 2.13.0.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

from torch._dynamo.bytecode_analysis import livevars_analysis
from torch._dynamo.current_scope_id import current_scope_id
from torch._dynamo.exc import unimplemented
from torch._dynamo.side_effects import SideEffects
from torch._dynamo.variables import higher_order_ops
from torch._dynamo.variables.base import ValueMutationNew, VariableTracker
from torch._dynamo.variables.higher_order_ops import CheckpointHigherOrderVariable
from torch._dynamo.variables.tensor import TensorVariable

from cotrain_compile.capture.dynamo.session import Session

Patch = tuple[Any, str, Any]

_READ_LATER = (
    "a checkpointed function adds to a list or dictionary that is read behind backward(), where "
    "eager has run the function again and added twice: read it before backward(), or return from "
    "the function what it adds"
)


def checkpoint_effects_traced(session: Session) -> Iterator[Patch]:
    """What is replaced so that checkpoints may fill what the step has made."""
    if not hasattr(higher_order_ops, "collect_intermediate_outputs"):
        return
    tracers: list[Any] = []
    filled: list[VariableTracker] = []
    call = _noted(tracers, CheckpointHigherOrderVariable._call_function)
    yield CheckpointHigherOrderVariable, "_call_function", call
    allowed = _filling(tracers, filled, SideEffects.check_allowed_side_effect)
    yield SideEffects, "check_allowed_side_effect", allowed
    backward = _unread(session, filled, TensorVariable.method_backward)
    yield TensorVariable, "method_backward", backward


def _noted(tracers: list[Any], original: Callable[..., Any]) -> Callable[..., Any]:
    """`original`, which traces a checkpoint, noting in which tracer it stands if not reentrant."""

    @functools.wraps(original)
    def call(self: Any, tx: Any, args: Any, kwargs: Any) -> Any:
        asked = kwargs.get("use_reentrant")
        known = asked is not None and asked.is_python_constant()
        if not known or asked.as_python_constant() is not False:
            return original(self, tx, args, kwargs)
        tracers.append(tx.output.current_tracer)
        try:
            return original(self, tx, args, kwargs)
        finally:
            tracers.pop()

    return call


def _filling(
    tracers: list[Any], filled: list[VariableTracker], original: Callable[..., Any]
) -> Callable[..., Any]:
    """`original`, which refuses changes of what is outside, but for what the step has made."""

    @functools.wraps(original)
    def check(self: SideEffects, item: VariableTracker) -> Any:
        made = item.mutation_type
        output = self.output_graph_weakref()
        if not tracers or output is None or not isinstance(made, ValueMutationNew):
            return original(self, item)
        tracer: Any = output.current_tracer
        # Dynamo has what is added leave one checkpoint, as a result of it, but not a second one.
        if tracer.parent is not tracers[-1] or made.scope != current_scope_id() - 1:
            return original(self, item)
        filled.append(item)
        tracer.traced_with_externally_visible_side_effects = True
        return True

    return check


def _unread(
    session: Session, filled: list[VariableTracker], original: Callable[..., Any]
) -> Callable[..., Any]:
    """`original`, a traced `backward()`, refused where what was filled is read behind it."""

    @functools.wraps(original)
    def backward(self: Any, tx: Any, *args: Any, **kwargs: Any) -> Any:
        if filled and _is_reached(tx, {id(item) for item in filled}):
            session.refuse(_READ_LATER)
            unimplemented(
                gb_type="cotrain", context="checkpoint", explanation=_READ_LATER, hints=[]
            )
        filled.clear()
        return original(self, tx, *args, **kwargs)

    return backward


def _is_reached(tx: Any, items: set[int]) -> bool:
    """Whether any of `items` can be had from what is still read, or outlives the step."""
    effects = tx.output.side_effects
    outlives = [v for v in effects.id_to_variable.values() if getattr(v, "source", None)]
    found, visited = False, dict[int, Any]()
    waiting = [*outlives, *_still_read(tx)]

    def look(variable: VariableTracker) -> None:
        nonlocal found
        found = found or id(variable) in items
        # What the step has set on an object lies beside it; torch 2.11 does not visit that.
        waiting.extend(effects.store_attr_mutations.get(variable, {}).values())

    while waiting:
        VariableTracker.visit(look, waiting.pop(), visited)
    return found


def _still_read(tx: Any) -> Iterator[Any]:
    """What each function that is being traced has at hand, and reads behind this point."""
    frame = tx
    while frame is not None:
        reads = livevars_analysis(frame.instructions, frame.current_instruction)
        yield from (value for name, value in frame.symbolic_locals.items() if name in reads)
        yield from frame.stack
        frame = getattr(frame, "parent", None)

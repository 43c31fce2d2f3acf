"""Capture: the user's step function becomes one functional ATen graph, a `StepGraph`.

torch.compile(step) --Dynamo, changed by `hook`--> graph of torch calls
  --`aot`--> ATen graph --`kernel_values`--> --`rematerialise`--> --`prepare`-->
  --`inputs`, `phases`--> StepGraph
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import fx
from torch._dynamo.exc import TensorifyScalarRestartAnalysis

from cotrain_compile.capture.aten.aot import (
    also_given_away,
    detach_outputs,
    drop_outputs,
    gradient_stores,
    params_with_gradient,
    refuse_sparse_gradients,
    refuse_unseen_hooks,
    to_aten,
    traced_modules,
)
from cotrain_compile.capture.aten.fake_values import use_kernel_values
from cotrain_compile.capture.aten.prepare import prepare
from cotrain_compile.capture.counts import tell_ops
from cotrain_compile.capture.dynamo.as_eager import do_as_eager
from cotrain_compile.capture.dynamo.diagnose import (
    refuse_checks_of_data,
    refuse_linear_algebra_that_raises,
    refuse_sizes_from_data,
)
from cotrain_compile.capture.dynamo.gradient_hooks import can_be_traced
from cotrain_compile.capture.dynamo.hook import install
from cotrain_compile.capture.dynamo.leaves import (
    hide_writes_by_aliases,
    refuse_shared_data,
    run_and_make_leaves,
)
from cotrain_compile.capture.dynamo.optimizers import guard_parameters_without_optimizer
from cotrain_compile.capture.dynamo.session import Session, current_session
from cotrain_compile.capture.nodes.phases import mark_written_backwards, phases
from cotrain_compile.capture.remat import rematerialise, saved_values
from cotrain_compile.capture.roles.accumulation import (
    dropped_gradients,
    kept_in,
    kept_outputs,
    note_dropped,
    refuse_additions_to_dropped,
    refuse_missing_updates,
    refuse_untrained,
)
from cotrain_compile.capture.roles.inputs import describe_inputs, shared_memory
from cotrain_compile.capture.roles.local_parts import LocalParts, local_parts
from cotrain_compile.dataflow import PERSISTENT_ROLES, Checkpoints
from cotrain_compile.graph import OptimizerRule, StepGraph

__all__ = ["Session", "capture", "current_session", "install"]

# What torch says where it cannot make one input of some that share what is written: their sizes
# change, or some are views.
_NO_ONE_INPUT = ("Expected !size_bytes_is_heap_allocated_", "Aliased inputs share storage")

StepCompiler = Callable[[StepGraph, Sequence[Any]], Callable[..., Any]]


def capture(
    session: Session,
    module: fx.GraphModule,
    example_inputs: Sequence[Any],
    compile_step: StepCompiler,
) -> Callable[..., Any]:
    """Turn Dynamo's graph into a `StepGraph`, have it compiled, and return what runs the step.

    `compile_step` gets the step graph and the user's own tensors in the order of its inputs. Raises
    `CaptureError` when the graph is not a whole training step.
    """
    session.trace_ended()
    session.graph_was_compiled = True
    _refuse_what_is_no_step(session, module, example_inputs)
    placeholders = [node for node in module.graph.nodes if node.op == "placeholder"]
    inputs = describe_inputs(
        placeholders, example_inputs, traced_modules(), session.optimizers, session.scalers
    )
    refuse_shared_data(module, session.copied_data)
    detach_outputs(module)
    mark_written_backwards(module)
    hide_writes_by_aliases(module)
    kept = _kept_gradients(session, module, example_inputs)
    remat = session.options.remat_on(_device_type(placeholders))
    dissolve = session.options.checkpoints == "dissolve"
    prepare_aten = partial(_prepared, remat=remat, dissolve=dissolve)

    def compile_aten(aten_module: fx.GraphModule, checkpoints: Checkpoints) -> Callable[..., Any]:
        parts = local_parts(aten_module, inputs, example_inputs)
        step = _step_graph(session, aten_module, parts)
        kept_gradients = kept_in(step, kept, parts.whole)
        step = replace(step, kept=kept_gradients, checkpoints=checkpoints)
        refuse_missing_updates(session, step, parts.whole)
        session.keeping_gradient = parts.local_ids(session.keeping_gradient)
        return compile_step(step, parts.values)

    try:
        compiled = to_aten(
            module, example_inputs, inputs, prepare_aten, compile_aten, (remat, dissolve)
        )
    except (RuntimeError, AssertionError) as error:
        if any(words in str(error) for words in _NO_ONE_INPUT):
            raise shared_memory(inputs, example_inputs) from error
        raise
    for record in session.optimizers:
        _note_step_for_schedulers(record.optimizer)
    return run_and_make_leaves(compiled, module, session.leaves_made)


def _refuse_what_is_no_step(
    session: Session, module: fx.GraphModule, example_inputs: Sequence[Any]
) -> None:
    """Raise where Dynamo's graph is not that of a step that trains; do in it as eager does."""
    refuse_sizes_from_data(module)
    refuse_linear_algebra_that_raises(module)
    do_as_eager(module)
    params = params_with_gradient(module, example_inputs)
    if not can_be_traced():
        refuse_unseen_hooks(params)
    refuse_untrained(session, params, module)
    refuse_additions_to_dropped(session, params)
    guard_parameters_without_optimizer(session, module)
    refuse_sparse_gradients(module)
    _restart_without_unused_states(session)


def _kept_gradients(
    session: Session, module: fx.GraphModule, example_inputs: Sequence[Any]
) -> tuple[int, Mapping[int, torch.Tensor]]:
    """The gradients that are there after the step; those that the next one clears are dropped."""
    stores = gradient_stores(module, example_inputs)
    dropped = dropped_gradients(session) - also_given_away(stores)
    note_dropped(session, {id(param) for param, _ in stores} & dropped)
    drop_outputs(module, [node for param, node in stores if id(param) in dropped])
    session.keeping_gradient = {id(param) for param, _ in stores} - dropped
    return kept_outputs(module, [(p, node) for p, node in stores if id(p) not in dropped])


def _prepared(aten_module: fx.GraphModule, *, remat: bool, dissolve: bool) -> Checkpoints:
    """Rewrite a lowered step in place, before it has a plan; what is in a checkpoint."""
    tell_ops(aten_module.graph)
    refuse_checks_of_data(aten_module.graph)
    use_kernel_values(aten_module.graph)
    saved = saved_values if remat else None
    checkpoints = rematerialise(aten_module.graph, saved, dissolve=dissolve)
    prepare(aten_module)
    return checkpoints


def _restart_without_unused_states(session: Session) -> None:
    """Have Dynamo trace again where states were made for a parameter that this call updates not.

    Eager makes them in the first update: none for a parameter that never gets a gradient.
    """
    used = session.updated
    changed = [record.create_state_only_for(used) for record in session.optimizers]
    if any(changed):
        raise TensorifyScalarRestartAnalysis(restart_reason="optimizer state of unused parameters")


def _device_type(placeholders: Sequence[fx.Node]) -> str:
    """Where the step computes: "cuda" as soon as one of its tensors is seen there."""
    seen = [node.meta.get("example_value") for node in placeholders]
    types = {value.device.type for value in seen if isinstance(value, torch.Tensor)}
    return "cuda" if "cuda" in types else "cpu"


def _step_graph(
    session: Session,
    module: fx.GraphModule,
    parts: LocalParts,
) -> StepGraph:
    placeholders, inputs = module.graph.find_nodes(op="placeholder"), parts.inputs
    if len(placeholders) != len(inputs):
        raise shared_memory(inputs, parts.values)
    named = tuple(
        replace(item, node=node.name) for node, item in zip(placeholders, inputs, strict=True)
    )
    enlarged = [
        _with_whole_storage(node.meta["val"], value)
        for node, item, value in zip(placeholders, inputs, parts.values, strict=True)
        if item.role in PERSISTENT_ROLES and isinstance(value, torch.Tensor)
    ]
    if any(enlarged):
        use_kernel_values(module.graph)
    names = {id(value): item.name for value, item in zip(parts.whole, inputs, strict=True)}
    rules = {
        names[id(param)]: OptimizerRule(
            type(record.optimizer), {k: v for k, v in group.items() if k != "params"}
        )
        for record in session.optimizers
        for group in record.optimizer.param_groups
        for param in group["params"]
        if id(param) in names
    }
    return StepGraph(module, named, phases(module.graph), _modules(module.graph), rules).verify()


def _with_whole_storage(traced: torch.Tensor, value: torch.Tensor) -> bool:
    """Give a traced tensor a storage as large as the real one, if it is a part; whether it is.

    A trace has storages that just hold what is shown; what is alive on a tier is all of it.
    """
    shown, whole = traced.untyped_storage(), value.untyped_storage()
    if not isinstance(shown.nbytes(), int) or shown.nbytes() >= whole.nbytes():
        return False
    shown.resize_(whole.nbytes())
    return True


def _modules(graph: fx.Graph) -> dict[str, str]:
    """Dotted path of the module that called each node of the forward."""
    paths: dict[str, str] = {}
    for node in graph.nodes:
        stack = node.meta.get("nn_module_stack") or {}
        if stack:
            path, _ = list(stack.values())[-1]
            paths[node.name] = path.partition("].")[2] if "]." in path else path
    return paths


def _note_step_for_schedulers(optimizer: torch.optim.Optimizer) -> None:
    # Learning rate schedulers wrap `optimizer.step` to warn when they run before its first call.
    if getattr(optimizer.step, "_wrapped_by_lr_sched", False):
        optimizer._opt_called = True  # type: ignore[attr-defined]

"""Sharded modules in the trace: FSDP2's hooks are not run, and parameters are gathered where read.

FSDP's own hooks break the graph. Here the hooks around a forward are traced as what they do to its
inputs and outputs, and a parameter that is read as an attribute of a module while such a forward
runs is the whole one, gathered in the graph. The model itself stays as it is.

Private torch API used: `UnspecializedNNModuleVariable.manually_trace_nn_module_getattr`,
`VariableTracker`, `config.skip_fsdp_guards`, `exc.RestartAnalysis`, and what `distribute.fsdp`
names. Reason: there is no public way to trace a hook or an attribute otherwise. Tried on torch
2.13.0.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NoReturn
from unittest import mock

import torch
from torch._dynamo import config
from torch._dynamo.exc import RestartAnalysis, unimplemented
from torch._dynamo.source import GlobalSource
from torch._dynamo.variables import ConstantVariable
from torch._dynamo.variables.base import VariableTracker
from torch._dynamo.variables.functions import UserFunctionVariable
from torch._dynamo.variables.nn_module import UnspecializedNNModuleVariable
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.distributed.fsdp._fully_shard._fsdp_state import FSDPState

from cotrain_compile.capture.dynamo.session import Session
from cotrain_compile.distribute import fsdp
from cotrain_compile.distribute.ranks import why_no_dtensor_steps
from cotrain_compile.distribute.shard import gathered, gathered_part

_READ = "manually_trace_nn_module_getattr"
# All hooks of FSDP's are one function around different ones.
_HOOK_CODE = FSDPState._pre_forward.__code__
# When to communicate is in the graph: a captured step reduces each micro-batch, up to rounding the
# same sum.
_WHEN_TO_COMMUNICATE = (
    FSDPModule.set_requires_gradient_sync,
    FSDPModule.set_requires_all_reduce,
    FSDPModule.set_is_last_backward,
    FSDPModule.unshard,
    FSDPModule.reshard,
)


@contextmanager
def gathering_traced(session: Session) -> Iterator[None]:
    """Within it, parameters that FSDP shards are gathered where a traced forward reads them."""
    read = _gathering(session, getattr(UnspecializedNNModuleVariable, _READ))
    # With it, a compiled step would run on whatever parameters the model has later.
    with (
        config.patch(skip_fsdp_guards=False),
        mock.patch.object(UnspecializedNNModuleVariable, _READ, read),
    ):
        yield


def fsdp_traced(session: Session, tx: Any, func: Any, args: list[Any]) -> tuple[Any, list[Any]]:
    """The function and arguments to trace for a call: themselves, but for what is FSDP's."""
    called = getattr(func, "fn", None)
    code = getattr(called, "__code__", None)
    if code is _HOOK_CODE:
        args = [argument.realize() for argument in args]
    owner = vars(args[0]).get("value") if args else None
    if called is FullyShardedDataParallel.forward:
        _refuse(session, _FSDP1)
    if isinstance(owner, FSDPModule) and called in _WHEN_TO_COMMUNICATE:
        return _traced(fsdp.nothing), args
    if code is not _HOOK_CODE:
        return func, args
    if not isinstance(owner, FSDPState):
        _refuse(session, _IN_A_LIST)
    if called is FSDPState._pre_forward:
        return _enter(session, tx, owner, args)
    if called is FSDPState._post_forward:
        return _leave(session, tx, owner, args)
    return func, args


def _traced(function: Any) -> UserFunctionVariable:
    """`function` as what the trace calls in place of another."""
    return UserFunctionVariable(function)


def _trace_of(session: Session, tx: Any) -> fsdp.ShardedTrace:
    if session.sharded.graph is not tx.output:
        session.sharded = fsdp.ShardedTrace(tx.output)
    return session.sharded


def _enter(session: Session, tx: Any, state: FSDPState, args: list[Any]) -> tuple[Any, list[Any]]:
    if (too_old := why_no_dtensor_steps()) is not None:
        _refuse(session, too_old)
    trace, module = _trace_of(session, tx), args[1].value
    if not trace.gatherings.keys() >= fsdp.gatherings(state).keys():
        if fsdp.keep_sharded(module):
            raise RestartAnalysis(restart_reason="parameters that FSDP had gathered in eager")
        if (why := fsdp.why_refused(module)) is not None:
            _refuse(session, why)
        for _, inner in fsdp.states_in(module):
            trace.gatherings.update(fsdp.gatherings(inner))
    trace.running += 1
    policy = state._mp_policy
    if policy.cast_forward_inputs and policy.param_dtype is not None:
        dtype = ConstantVariable.create(policy.param_dtype)
        return _traced(fsdp.enter_with_cast), [dtype, *args]
    return _traced(fsdp.enter), args


def _leave(session: Session, tx: Any, state: FSDPState, args: list[Any]) -> tuple[Any, list[Any]]:
    trace = _trace_of(session, tx)
    trace.running -= 1
    if not trace.running:
        trace.gathered.clear()
    dtype = state._mp_policy.output_dtype
    if dtype is not None:
        return _traced(fsdp.leave_with_cast), [ConstantVariable.create(dtype), *args]
    return _traced(fsdp.leave), args


def _gathering(session: Session, original: Callable[..., Any]) -> Callable[..., Any]:
    """`original`, which reads an attribute of a module, but for what FSDP shards in a forward."""

    @functools.wraps(original)
    def read(self: Any, tx: Any, name: str) -> Any:
        found = original(self, tx, name)
        trace = _trace_of(session, tx)
        param = self.value._parameters.get(name) if trace.running else None
        how = trace.gatherings.get(id(param))
        if how is None:
            return found
        # What the body of a checkpoint makes is not known outside of it.
        key = id(param), tx.output.current_tracer, torch.is_grad_enabled()
        if key not in trace.gathered:
            trace.gathered[key] = _gathered(tx, found.realize(), how)
        return trace.gathered[key]

    return read


def _gathered(tx: Any, param: Any, how: fsdp.Gathering) -> Any:
    """What stands for `param` while a forward uses it."""
    dtypes = [*map(ConstantVariable.create, (how.param_dtype, how.reduce_dtype))]
    if how.part is None:
        return _traced(gathered).call_function(tx, [param, *dtypes], {})
    meshes = [_mesh(tx, mesh) for mesh in (how.part.data, how.part.tensor)]
    sizes = [VariableTracker.build(tx, size) for size in (how.part.shape, how.part.stride)]
    return _traced(gathered_part).call_function(tx, [param, *meshes, *sizes, *dtypes], {})


def _mesh(tx: Any, mesh: DeviceMesh) -> VariableTracker:
    """`mesh` as what a graph is given: a trace knows none that comes from nowhere."""
    source = GlobalSource(tx.output.install_global_by_id("_cotrain_mesh", mesh))
    found: VariableTracker = VariableTracker.build(tx, mesh, source)
    return found


def _refuse(session: Session, message: str) -> NoReturn:
    session.refuse(message)
    unimplemented(gb_type="cotrain", context="fully_shard", explanation=message, hints=[])


_FSDP1 = (
    "FullyShardedDataParallel flattens parameters in hooks of its own, which are not captured; use "
    "fully_shard(model) of torch.distributed.fsdp, or cotrain_compile.shard(model)"
)
_IN_A_LIST = (
    "fully_shard was called on a list of modules, whose hooks count which of them have run; call "
    "it on each of them"
)

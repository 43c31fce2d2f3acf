"""DistributedDataParallel in the trace: its forward is its module's, its backward ends in means.

Which gradients a backward reduces is what its reducer would: all that were added to since the last
time, of each `DistributedDataParallel` whose forward was last called outside of `no_sync()`. The
two belong together: where the forward is traced so, the means are taken.

Private torch API used: as in `gradient_hooks`, `UserFunctionVariable`, `ConstantVariable`. Reason:
stock Dynamo breaks the graph at the reducer. Tried on torch 2.13.0, 2.14.1 and 2.15.0.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, NoReturn
from unittest import mock

import torch
from torch import nn
from torch._dynamo.exc import unimplemented
from torch._dynamo.symbolic_convert import InstructionTranslator
from torch._dynamo.variables import ConstantVariable
from torch._dynamo.variables.functions import UserFunctionVariable
from torch._dynamo.variables.tensor import TensorVariable
from torch._dynamo.variables.torch import TorchInGraphFunctionVariable
from torch.fx.traceback import annotate, preserve_node_meta
from torch.nn.parallel import DistributedDataParallel

from cotrain_compile.capture.dynamo.attributes import attribute_of
from cotrain_compile.capture.dynamo.gradient_hooks import can_be_traced
from cotrain_compile.capture.dynamo.session import Session
from cotrain_compile.capture.nodes.phases import PHASE_ANNOTATION
from cotrain_compile.distribute import ddp as instead
from cotrain_compile.distribute import sync_norm

_ACCUMULATE = torch.ops.inductor.accumulate_grad_.default


def _seen_by(session: Session, tx: Any) -> dict[int, instead.SeenDdp]:
    """What this attempt at the trace has seen, by id: Dynamo may begin again with a new graph."""
    if session.ddp_seen_in is not tx.output:
        session.ddp_seen_in, session.ddp_seen = tx.output, {}
    return session.ddp_seen


def forward_traced(session: Session, tx: Any, func: Any, args: list[Any]) -> tuple[Any, list[Any]]:
    """The function and arguments to trace for a call: themselves, but for a forward of DDP."""
    module = vars(args[0]).get("value") if args else None
    called = getattr(func, "fn", None)
    if called is nn.SyncBatchNorm.forward and isinstance(module, nn.SyncBatchNorm):
        return _synchronised(module, func, args)
    is_forward = called is DistributedDataParallel.forward
    if not is_forward or not isinstance(module, DistributedDataParallel):
        return func, args
    why = instead.why_refused(module) if can_be_traced() else _TOO_OLD
    if why is not None:
        _refuse(session, why)
    seen = _seen_by(session, tx).setdefault(id(module), instead.seen_first(module))
    wanted = attribute_of(args[0], tx, "require_backward_grad_sync").as_python_constant()
    if torch.is_grad_enabled():
        seen.synchronises = bool(wanted)
    told = [ConstantVariable.create(seen.group_name), ConstantVariable.create(seen.ranks)]
    forward: Any = instead.forward
    return UserFunctionVariable(forward), [args[0], *told, *args[1:]]


def _synchronised(norm: nn.SyncBatchNorm, func: Any, args: list[Any]) -> tuple[Any, list[Any]]:
    """What to trace for a forward of `norm`: where it takes no statistics, its own."""
    if not torch.distributed.is_initialized() or not sync_norm.takes_statistics(norm):
        return func, args
    group_name, ranks = sync_norm.group_of(norm)
    if ranks == 1:
        return func, args
    told = [ConstantVariable.create(group_name), ConstantVariable.create(ranks)]
    forward: Any = sync_norm.forward
    return UserFunctionVariable(forward), [args[0], *told, *args[1:]]


@contextmanager
def means_traced(session: Session) -> Iterator[None]:
    """Within it, a traced `backward()` ends with the mean of each gradient over the ranks."""
    with ExitStack() as stack:
        if can_be_traced():
            handlers = TorchInGraphFunctionVariable._get_handlers()
            accumulate = _noting(session, handlers[_ACCUMULATE])
            stack.enter_context(mock.patch.dict(handlers, {_ACCUMULATE: accumulate}))
            backward = _with_means(session, TensorVariable.method_backward)
            stack.enter_context(mock.patch.object(TensorVariable, "method_backward", backward))
        yield


def _noting(session: Session, original: Callable[..., Any]) -> Callable[..., Any]:
    """`original`, which traces an accumulation, noted with the DDP whose gradient it is."""

    @functools.wraps(original)
    def accumulate(self: Any, tx: Any, leaf: Any, gradient: Any, *rest: Any) -> Any:
        result = original(self, tx, leaf, gradient, *rest)
        leaf = leaf.realize()
        argument = leaf.as_proxy().node.meta.get("grapharg")
        param = getattr(argument, "example", None)
        for seen in _seen_by(session, tx).values():
            if seen.ranks > 1 and id(param) in seen.params and gradient.is_tensor():
                if gradient.requires_grad:
                    _refuse(session, _DIFFERENTIATED)
                seen.added_to[id(param)] = leaf
        return result

    return accumulate


def _with_means(session: Session, original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def backward(*args: Any, **kwargs: Any) -> Any:
        result = original(*args, **kwargs)
        tx = InstructionTranslator.current_tx()
        for seen in _seen_by(session, tx).values():
            if seen.synchronises and seen.added_to:
                _refuse_forgotten(session, seen)
                _take_means(session, tx, seen)
        return result

    return backward


def _take_means(session: Session, tx: Any, seen: instead.SeenDdp) -> None:
    told = [ConstantVariable.create(seen.group_name), ConstantVariable.create(seen.ranks)]
    take_mean: Any = instead.take_mean
    for leaf in seen.added_to.values():
        if not attribute_of(leaf, tx, "grad").is_tensor():
            _refuse(session, _TAKEN_BY_A_HOOK)
        with preserve_node_meta(), annotate({PHASE_ANNOTATION: "mean"}):
            UserFunctionVariable(take_mean).call_function(tx, [leaf, *told], {})
    seen.added_to.clear()


def _refuse_forgotten(session: Session, seen: instead.SeenDdp) -> None:
    """A gradient of an earlier call that this one does not use would stay what it is here alone."""
    if not seen.ddp.find_unused_parameters:
        return  # the reducer of eager would wait for it
    for param in seen.ddp._module_parameters:
        is_old = param.grad is not None and id(param) not in session.cleared_first
        if is_old and id(param) not in seen.added_to:
            _refuse(session, _FROM_AN_EARLIER_CALL)


def _refuse(session: Session, message: str) -> NoReturn:
    session.refuse(message)
    unimplemented(gb_type="cotrain", context="ddp", explanation=message, hints=[])


_TOO_OLD = "DistributedDataParallel in a step needs torch 2.13 or newer; install that"
_DIFFERENTIATED = (
    "backward(create_graph=True) would differentiate through the mean over ranks that "
    "DistributedDataParallel takes; compute such a term with torch.autograd.grad() in the step"
)
_TAKEN_BY_A_HOOK = (
    "a hook of a parameter takes its gradient away before DistributedDataParallel reduces it, so "
    "that ranks would train apart; remove the hook and do its work in the step, after backward()"
)
_FROM_AN_EARLIER_CALL = (
    "a parameter of DistributedDataParallel(find_unused_parameters=True) has a gradient from an "
    "earlier call and none from this one; run the micro-batches of an update in one step"
)

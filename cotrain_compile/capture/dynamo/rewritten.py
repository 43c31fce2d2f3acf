"""Functions of torch that are traced as others with the same result, as Dynamo cannot trace them.

`torch.autograd.backward` of several losses is the backward of their sum, by which each gets a
gradient of one. `AveragedModel.update_parameters` copies the model in its first call and averages
from then on, by a count that is in a tensor: both are computed, and `torch.where` chooses.

`load_state_dict` in the step copies tensors by their names, where it does no more than that.

`disable_cache_limit`, by which torchao's optimizers compile any number of updates, does nothing.

Private torch API used: `trace_rules.get_torch_obj_rule_map`, `Module._load_from_state_dict`, hooks
of state dictionaries, `_IncompatibleKeys`. Reason: Dynamo breaks the graph at
`torch.autograd.backward` and within `load_state_dict`. Tried on torch 2.13.0.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch._dynamo import trace_rules
from torch._dynamo.utils import disable_cache_limit
from torch._dynamo.variables.functions import UserFunctionVariable
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.modules.module import _IncompatibleKeys
from torch.optim import swa_utils
from torch.optim.swa_utils import AveragedModel

_SWA: Any = swa_utils  # its functions have no types


@contextmanager
def rewritten_traced() -> Iterator[None]:
    """Within it, calls of the functions that `rewritten` knows reach it."""
    rules = trace_rules.get_torch_obj_rule_map()
    reached = dict.fromkeys((torch.autograd.backward, disable_cache_limit), UserFunctionVariable)
    with mock.patch.dict(rules, reached):
        yield


def rewritten(func: Any, args: Sequence[Any]) -> Any:
    """What to trace for a call of `func`: itself, or the function here that does the same."""
    called = getattr(func, "fn", None)
    other = _INSTEAD.get(called)
    if called is nn.Module.load_state_dict and not _loads_by_name(vars(args[0]).get("value")):
        return func
    return func if other is None else UserFunctionVariable(other)


def _backward_of_all(
    tensors: Any,
    grad_tensors: Any = None,
    retain_graph: bool | None = None,
    create_graph: bool = False,
    grad_variables: Any = None,
    inputs: Any = None,
) -> None:
    gradients = grad_variables if grad_tensors is None else grad_tensors
    if isinstance(tensors, Tensor):
        tensors, gradients = [tensors], [gradients]
    if gradients is None:
        gradients = [None] * len(tensors)
    with torch.enable_grad():  # within the backward of a `Function` there is none
        losses = [
            tensor if gradient is None else (tensor * gradient.detach()).sum()
            for tensor, gradient in zip(tensors, gradients, strict=False)
        ]
        total = losses[0]
        for loss in losses[1:]:
            total = total + loss
    if inputs is None:
        total.backward(retain_graph=retain_graph, create_graph=create_graph)
    else:
        total.backward(retain_graph=retain_graph, create_graph=create_graph, inputs=inputs)


def _update_average(average: AveragedModel, model: torch.nn.Module) -> None:
    averaged: list[Tensor] = [*average.module.parameters()]
    current: list[Tensor] = [*model.parameters()]
    if average.use_buffers:
        averaged += list(average.module.buffers())
        current += list(model.buffers())
    with torch.no_grad():
        _average(average, averaged, current)
        if not average.use_buffers:
            for copy, buffer in zip(average.module.buffers(), model.buffers(), strict=False):
                copy.copy_(buffer)
        average.n_averaged += 1


def _average(average: AveragedModel, averaged: list[Tensor], current: list[Tensor]) -> None:
    """Write the average into `averaged`, or what is in `current` where it is the first call."""
    is_first = average.n_averaged == 0
    together = average.multi_avg_fn
    if together is None and average.avg_fn is None and averaged[0].device.type != "cpu":
        together = _SWA.get_swa_multi_avg_fn()
    if together is None:
        one_by_one = average.avg_fn or _SWA.get_swa_avg_fn()
        found = [
            one_by_one(old, new, average.n_averaged)
            for old, new in zip(averaged, current, strict=False)
        ]
    else:
        found = [old.clone() for old in averaged]
        for dtype in {value.dtype: None for value in averaged}:
            at = [place for place, value in enumerate(averaged) if value.dtype == dtype]
            together([found[i] for i in at], [current[i] for i in at], average.n_averaged)
    for old, new, mean in zip(averaged, current, found, strict=False):
        old.copy_(torch.where(is_first, new.to(old.device), mean.to(old.dtype)))


def _load_state_dict(
    module: nn.Module, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False
) -> Any:
    own = module.state_dict(keep_vars=True)
    if assign or own.keys() != state_dict.keys():
        torch._dynamo.graph_break(msg="load_state_dict with assign=True, or of other names")
    with torch.no_grad():
        for name, value in own.items():
            if value.shape != state_dict[name].shape:
                torch._dynamo.graph_break(msg="load_state_dict of another shape")
            value.copy_(state_dict[name])
    return _IncompatibleKeys([], [])


def _no_limit() -> Any:
    """`disable_cache_limit`, which says how often functions may be compiled, not how they run."""
    return contextlib.nullcontext()


def _loads_by_name(module: Any) -> bool:
    """Whether `load_state_dict` of `module` copies each tensor into that of its name, and no more.

    Norms differ only where they load what old versions of torch have saved.
    """
    plain = (nn.Module._load_from_state_dict, _NormBase._load_from_state_dict)
    return (
        isinstance(module, nn.Module)
        and not torch.__future__.get_swap_module_params_on_conversion()
        and all(
            type(m)._load_from_state_dict in plain
            and type(m).set_extra_state is nn.Module.set_extra_state
            and type(m).state_dict is nn.Module.state_dict
            and not any(getattr(m, hooks, None) for hooks in _HOOKS_OF_STATE_DICTS)
            for m in module.modules()
        )
    )


_HOOKS_OF_STATE_DICTS = (
    "_load_state_dict_pre_hooks",
    "_load_state_dict_post_hooks",
    "_state_dict_hooks",
    "_state_dict_pre_hooks",
)

_INSTEAD: dict[Any, Any] = {
    disable_cache_limit: _no_limit,
    nn.Module.load_state_dict: _load_state_dict,
    torch.autograd.backward: _backward_of_all,
    AveragedModel.update_parameters: _update_average,
}

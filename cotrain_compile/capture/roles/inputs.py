"""Names and roles of the step's inputs: which tensor is which parameter, state, batch.

Dynamo names an input after the first way it was reached (often through the optimizer). Users know
parameters by their module path, so tensors are looked up by identity in the modules and optimizers
that the trace has met.

Inputs that share memory, where the step writes it: which they are, and the way on.

AOTAutograd makes one input of them all, so that none has a home of its own.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx, nn
from torch.distributed.device_mesh import DeviceMesh

from cotrain_compile.capture.state.optimizer_state import OptimizerRecord
from cotrain_compile.capture.state.scaler_state import ScalerRecord
from cotrain_compile.dataflow import Role
from cotrain_compile.errors import CaptureError
from cotrain_compile.graph import StepInput


def describe_inputs(
    placeholders: Sequence[fx.Node],
    values: Sequence[object],
    modules: Sequence[tuple[str, nn.Module]],
    optimizers: Sequence[OptimizerRecord],
    scalers: Sequence[ScalerRecord] = (),
) -> tuple[StepInput, ...]:
    """One `StepInput` per placeholder of Dynamo's graph, whose real values are `values`.

    `modules` are the modules met while tracing with the source text they were reached by.
    """
    known = _known_tensors(_roots(modules), optimizers)
    for position, scaler in enumerate(scalers):
        for name, tensor in scaler.tensors().items():
            name = f"scaler{position}.{name}"
            known[id(tensor)] = _Known(name, Role.OPTIMIZER_STATE, key=name)
    taken: set[str] = set()
    inputs = []
    for placeholder, value in zip(placeholders, values, strict=True):
        found = known.get(id(value)) or _from_source(placeholder, value)
        name = _unique(found.name, taken)
        inputs.append(StepInput(placeholder.name, name, found.role, found.param, found.key))
    return tuple(inputs)


@dataclass(frozen=True)
class _Known:
    """What `StepInput` says of an input, but for the node."""

    name: str
    role: Role
    param: str = ""
    key: str = ""


def _known_tensors(
    roots: Sequence[tuple[str, nn.Module]], optimizers: Sequence[OptimizerRecord]
) -> dict[int, _Known]:
    known: dict[int, _Known] = {}
    for prefix, module in roots:
        for name, param in module.named_parameters():
            known.setdefault(id(param), _Known(prefix + name, Role.PARAM))
            if param.grad is not None:
                gradient = _Known(f"{prefix}{name}.grad", Role.GRADIENT, prefix + name)
                known.setdefault(id(param.grad), gradient)
        for name, buffer in module.named_buffers():
            known.setdefault(id(buffer), _Known(prefix + name, Role.BUFFER))
    for position, record in enumerate(optimizers):
        for g, group in enumerate(record.optimizer.param_groups):
            prefix = f"optimizer{position}.group{g}"
            for p, param in enumerate(group["params"]):
                name = known.setdefault(id(param), _Known(f"{prefix}.{p}", Role.PARAM)).name
                if param.grad is not None:
                    known[id(param.grad)] = _Known(f"{name}.grad", Role.GRADIENT, name)
                for key, value in record.optimizer.state.get(param, {}).items():
                    state = _Known(f"{name}.{key}", Role.OPTIMIZER_STATE, name, key)
                    known[id(value)] = state
            for key, value in group.items():
                if isinstance(value, torch.Tensor):
                    known[id(value)] = _Known(f"{prefix}.{key}", Role.HYPERPARAMETER)
    return known


def _roots(modules: Sequence[tuple[str, nn.Module]]) -> list[tuple[str, nn.Module]]:
    """The outermost modules, with a prefix for their names where there are several."""
    inner = {id(child) for _, m in modules for child in m.modules() if child is not m}
    outer = {id(m): (source, m) for source, m in modules if id(m) not in inner}
    if len(outer) == 1:
        return [("", module) for _, module in outer.values()]
    return [(_readable(source) + ".", module) for source, module in outer.values()]


def _from_source(placeholder: fx.Node, value: object) -> _Known:
    argument = placeholder.meta.get("grapharg")
    source: Any = getattr(argument, "source", None)
    text = str(getattr(source, "name", "") or placeholder.name)
    if callable(getattr(source, "name", None)):
        text = source.name()
    if isinstance(value, DeviceMesh):
        return _Known("mesh", Role.MESH)  # where it was found may differ by rank
    text = text.rpartition("_hooks[")[2]  # what a hook uses is its own, and not its parameter's
    name = _readable(text)
    if "param_groups" in text or not isinstance(value, torch.Tensor):
        setting = re.search(r"param_groups\.\d+\.(\w+(?:\.\d+)?)$", name)
        return _Known(name, Role.HYPERPARAMETER, key=setting[1] if setting else "")
    if isinstance(value, nn.Parameter) or (value.requires_grad and value.is_leaf):
        return _Known(name, Role.PARAM)
    return _Known(name, Role.BATCH)


def _readable(source: str) -> str:
    """`L['batch']['input_ids']` -> `batch.input_ids`."""
    text = re.sub(r"^[LG]\[['\"](\w+)['\"]\]", r"\1", source)
    text = re.sub(r"\[['\"]?([\w]+)['\"]?\]", r".\1", text)
    text = re.sub(r"\._(?:modules|parameters|buffers)\b", "", text)
    return re.sub(r"[^\w.]+", "_", text).strip("._") or "input"


def _unique(name: str, taken: set[str]) -> str:
    candidate, number = name, 1
    while candidate in taken:
        number += 1
        candidate = f"{name}~{number}"
    taken.add(candidate)
    return candidate


_FLAT = (
    "Let each have its own (p.grad = None before the first call; clip_grad_norm_ takes many "
    "tensors), or train the one flat buffer that they are parts of: torch.func.functional_call("
    "model, {name: flat[a:b].view(shape), ...}, inputs)"
)


def shared_memory(inputs: Sequence[StepInput], values: Sequence[object]) -> CaptureError:
    """The refusal of a step of which some `inputs`, with these `values`, share what it writes."""
    groups: dict[int, list[tuple[StepInput, torch.Tensor]]] = defaultdict(list)
    for item, value in zip(inputs, values, strict=True):
        if isinstance(value, torch.Tensor):
            groups[value.untyped_storage()._cdata].append((item, value))
    shared = [group for group in groups.values() if len(group) > 1]
    names = "; ".join(_listed([item.name for item, _ in group]) for group in shared)
    told = f"inputs of the step share memory that it writes: {names or 'parts of one buffer'}. "
    if shared and all(_is_batch(group) for group in shared):
        return CaptureError(told + "Pass in a .clone() of one of them")
    if shared and all(_is_tied(group) for group in shared):
        return CaptureError(
            told + "To tie parameters, have them be one: a.weight = b.weight, not "
            "a.weight.data = b.weight.data, and make the optimizer after that"
        )
    return CaptureError(told + _FLAT)


def _is_batch(group: Sequence[tuple[StepInput, torch.Tensor]]) -> bool:
    """Whether all but one of these that share memory are arguments, such as views of a batch."""
    return sum(item.role is not Role.BATCH for item, _ in group) <= 1


def _is_tied(group: Sequence[tuple[StepInput, torch.Tensor]]) -> bool:
    """Whether these are parameters that are the same memory from end to end."""
    places = {(value.data_ptr(), value.shape, value.stride()) for _, value in group}
    return len(places) == 1 and all(item.role is Role.PARAM for item, _ in group)


def _listed(names: Sequence[str]) -> str:
    first, more = names[:4], len(names) - 4
    return ", ".join(first) + (f" and {more} more" if more > 0 else "")

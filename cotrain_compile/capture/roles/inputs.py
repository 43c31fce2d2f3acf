"""Names and roles of the step's inputs: which tensor is which parameter, state, batch.

Dynamo names an input after the first way it was reached (often through the optimizer). Users know
parameters by their module path, so tensors are looked up by identity in the modules and optimizers
that the trace has met.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import torch
from torch import fx, nn

from cotrain_compile.capture.state.optimizer_state import OptimizerRecord
from cotrain_compile.capture.state.scaler_state import ScalerRecord
from cotrain_compile.dataflow import Role
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
            known[id(tensor)] = (f"scaler{position}.{name}", Role.OPTIMIZER_STATE, "")
    taken: set[str] = set()
    inputs = []
    for placeholder, value in zip(placeholders, values, strict=True):
        name, role, param = known.get(id(value)) or (*_from_source(placeholder, value), "")
        inputs.append(StepInput(placeholder.name, _unique(name, taken), role, param))
    return tuple(inputs)


def _known_tensors(
    roots: Sequence[tuple[str, nn.Module]], optimizers: Sequence[OptimizerRecord]
) -> dict[int, tuple[str, Role, str]]:
    known: dict[int, tuple[str, Role, str]] = {}
    for prefix, module in roots:
        for name, param in module.named_parameters():
            known.setdefault(id(param), (prefix + name, Role.PARAM, ""))
            if param.grad is not None:
                gradient = (f"{prefix}{name}.grad", Role.GRADIENT, prefix + name)
                known.setdefault(id(param.grad), gradient)
        for name, buffer in module.named_buffers():
            known.setdefault(id(buffer), (prefix + name, Role.BUFFER, ""))
    for position, record in enumerate(optimizers):
        for g, group in enumerate(record.optimizer.param_groups):
            prefix = f"optimizer{position}.group{g}"
            for p, param in enumerate(group["params"]):
                name = known.setdefault(id(param), (f"{prefix}.{p}", Role.PARAM, ""))[0]
                if param.grad is not None:
                    known[id(param.grad)] = (f"{name}.grad", Role.GRADIENT, name)
                for key, value in record.optimizer.state.get(param, {}).items():
                    known[id(value)] = (f"{name}.{key}", Role.OPTIMIZER_STATE, name)
            for key, value in group.items():
                if isinstance(value, torch.Tensor):
                    known[id(value)] = (f"{prefix}.{key}", Role.HYPERPARAMETER, "")
    return known


def _roots(modules: Sequence[tuple[str, nn.Module]]) -> list[tuple[str, nn.Module]]:
    """The outermost modules, with a prefix for their names where there are several."""
    inner = {id(child) for _, m in modules for child in m.modules() if child is not m}
    outer = {id(m): (source, m) for source, m in modules if id(m) not in inner}
    if len(outer) == 1:
        return [("", module) for _, module in outer.values()]
    return [(_readable(source) + ".", module) for source, module in outer.values()]


def _from_source(placeholder: fx.Node, value: object) -> tuple[str, Role]:
    argument = placeholder.meta.get("grapharg")
    source: Any = getattr(argument, "source", None)
    text = str(getattr(source, "name", "") or placeholder.name)
    if callable(getattr(source, "name", None)):
        text = source.name()
    text = text.rpartition("_hooks[")[2]  # what a hook uses is its own, and not its parameter's
    name = _readable(text)
    if "param_groups" in text:
        return name, Role.HYPERPARAMETER
    if not isinstance(value, torch.Tensor):
        return name, Role.HYPERPARAMETER
    if isinstance(value, nn.Parameter) or (value.requires_grad and value.is_leaf):
        return name, Role.PARAM
    return name, Role.BATCH


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

"""Walks of parameters: `module.parameters()` in a step, gone through at once.

A walk is a generator of torch's within one for each module on the way down, and Dynamo follows each
of them again for every parameter. Here the same dictionaries are looked at, in the same order and
with the guards of these looks; what a trace gets is a generator of what is found.

Private torch API used: `InstructionTranslatorBase.inline_generator_function`, variables of modules,
dictionaries and lists, `unpack_iterable`. Reason: a step that clips its gradients follows the walk,
a twentieth of a trace. Tried on torch 2.13.0.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import nn
from torch._dynamo import utils
from torch._dynamo.symbolic_convert import InstructionTranslatorBase
from torch._dynamo.variables.base import ValueMutationNew, VariableTracker
from torch._dynamo.variables.dicts import ConstDictVariable
from torch._dynamo.variables.functions import UserFunctionVariable
from torch._dynamo.variables.lists import ListVariable
from torch._dynamo.variables.nn_module import UnspecializedNNModuleVariable
from torch._dynamo.variables.tensor import TensorVariable

TRIED = ("2.13.",)
_GENERATOR = "inline_generator_function"
# What a walk calls; a class may have others of its own.
_OF_THE_FIRST = ("parameters", "named_parameters", "_named_members", "named_modules")
_OF_EACH = ("named_modules",)


def parameters_walked() -> Iterator[tuple[Any, str, Any]]:
    """What is replaced so that a walk is gone through at once: owner, name, what stands there."""
    if torch.__version__.startswith(TRIED):
        original = getattr(InstructionTranslatorBase, _GENERATOR)
        yield InstructionTranslatorBase, _GENERATOR, _walking(original)


def _walking(original: Callable[..., Any]) -> Callable[..., Any]:
    """`original`, which traces the call of a generator function."""

    @functools.wraps(original)
    def call(self: Any, fn: Any, args: Sequence[Any], kwargs: Any) -> Any:
        if getattr(fn, "fn", None) is nn.Module.parameters and len(args) == 1 and not kwargs:
            found = _Walk(self).parameters_of(args[0].realize())
            if found is not None:
                given = [ListVariable(found, mutation_type=ValueMutationNew())]
                return original(self, UserFunctionVariable(_each), given, {})  # type: ignore[arg-type]
        return original(self, fn, args, kwargs)

    return call


def _each(found: Sequence[nn.Parameter]) -> Iterator[nn.Parameter]:
    yield from found


class _UnknownError(Exception):
    """What stands in the way of a walk that is as torch's."""


class _Walk:
    """A walk through a module: what of it was seen, and the parameters `found`."""

    def __init__(self, tx: Any) -> None:
        self.tx = tx
        self.modules: set[int] = set()
        self.found: dict[Any, VariableTracker] = {}  # by node of the graph

    def parameters_of(self, module: Any) -> list[VariableTracker] | None:
        """The parameters that `module.parameters()` gives in turn; None where it may be another."""
        try:
            self._visit(module, _OF_THE_FIRST)
        except _UnknownError:
            return None
        return list(self.found.values())

    def _visit(self, module: Any, methods: Sequence[str] = _OF_EACH) -> None:
        if not isinstance(module, UnspecializedNNModuleVariable):
            raise _UnknownError
        value: Any = module.value
        if id(value) in self.modules:
            return
        self.modules.add(id(value))
        for name in methods:
            if getattr(type(value), name) is not getattr(nn.Module, name) or name in vars(value):
                raise _UnknownError
        for item in self._values(module, "_parameters"):
            if isinstance(item, TensorVariable):
                self.found.setdefault(item.as_proxy().node, item)
            elif not _is_none(item):
                raise _UnknownError
        for item in self._values(module, "_modules"):
            if not _is_none(item):
                self._visit(item)

    def _values(self, module: Any, name: str) -> Iterator[Any]:
        """The values of a dictionary of a module, each once all before it are looked at."""
        held = module.var_getattr(self.tx, name).realize()
        held = getattr(held, "_base_vt", held)
        if not isinstance(held, ConstDictVariable):
            raise _UnknownError
        for pair in utils.unpack_iterable(self.tx, held.call_method(self.tx, "items", [], {})):
            yield pair.items[1].realize()  # type: ignore[attr-defined]


def _is_none(item: VariableTracker) -> bool:
    return bool(item.is_python_constant()) and item.as_python_constant() is None

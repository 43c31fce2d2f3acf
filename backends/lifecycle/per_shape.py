"""PerShape: one captured graph, one plan for every combination of its dynamic sizes.

Memory depends on the batch, so a plan made for one batch size may not fit another. The graph is
captured once with symbolic sizes; placing and rewriting it again takes no new trace.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import torch

from cotrain_compile.graph import StepGraph

Run = Callable[[list[Any]], Any]
CompileFor = Callable[[Mapping[str, int], Sequence[Any]], Run]

# Plans kept; the one that ran longest ago goes first.
LIMIT = 16


class PerShape:
    """Runs what `compile_for` made for the sizes of its inputs, on their first use.

    `symbols` are the dynamic sizes of the step's dataflow. `compile_for` gets the sizes by symbol,
    and the inputs.
    """

    def __init__(self, step: StepGraph, symbols: Collection[str], compile_for: CompileFor) -> None:
        self._compile_for = compile_for
        self._compiled: OrderedDict[tuple[int, ...], Run] = OrderedDict()
        sizes = {
            position: value.node
            for position, node in enumerate(step.module.graph.find_nodes(op="placeholder"))
            if isinstance(value := node.meta.get("val"), torch.SymInt)
            and str(value.node.expr) in symbols
        }
        self._positions = tuple(sizes)
        self._symbols = tuple(str(size.expr) for size in sizes.values())
        self._traced = tuple(int(size.hint) for size in sizes.values())

    def compile_traced(self, inputs: Sequence[Any]) -> None:
        """Compile ahead of a call, for the sizes that the step was traced with."""
        self._compile(self._traced, inputs)

    def __call__(self, inputs: list[Any]) -> Any:
        key = tuple(int(inputs[position]) for position in self._positions)
        if key not in self._compiled:
            self._compile(key, inputs)
        self._compiled.move_to_end(key)
        return self._compiled[key](inputs)

    def _compile(self, key: tuple[int, ...], inputs: Sequence[Any]) -> None:
        sizes = dict(zip(self._symbols, key, strict=True))
        self._compiled[key] = self._compile_for(sizes, inputs)
        while len(self._compiled) > LIMIT:
            self._compiled.popitem(last=False)

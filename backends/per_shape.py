"""PerShape: one captured graph, one plan for every combination of its dynamic sizes.

Memory depends on the batch, so a plan made for one batch size may not fit another. The graph is
captured once with symbolic sizes; placing and rewriting it again takes no new trace.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Collection, Mapping
from typing import Any

import torch

from cotrain_compile.backends.compiled_step import CompiledStep
from cotrain_compile.graph import StepGraph

# Plans kept; the one that ran longest ago goes first.
LIMIT = 16


class PerShape:
    """Runs the `CompiledStep` for the sizes of its inputs, compiling it on their first use.

    `symbols` are the dynamic sizes of the step's dataflow.
    """

    def __init__(
        self,
        step: StepGraph,
        symbols: Collection[str],
        compile_for: Callable[[Mapping[str, int]], CompiledStep],
    ) -> None:
        self._compile_for = compile_for
        self._compiled: OrderedDict[tuple[int, ...], CompiledStep] = OrderedDict()
        sizes = {
            position: str(value.node.expr)
            for position, node in enumerate(step.module.graph.find_nodes(op="placeholder"))
            if isinstance(value := node.meta.get("val"), torch.SymInt)
            and str(value.node.expr) in symbols
        }
        self._positions, self._symbols = tuple(sizes), tuple(sizes.values())

    def __call__(self, inputs: list[Any]) -> Any:
        key = tuple(int(inputs[position]) for position in self._positions)
        if key not in self._compiled:
            self._compiled[key] = self._compile_for(dict(zip(self._symbols, key, strict=True)))
            while len(self._compiled) > LIMIT:
                self._compiled.popitem(last=False)
        self._compiled.move_to_end(key)
        return self._compiled[key](inputs)

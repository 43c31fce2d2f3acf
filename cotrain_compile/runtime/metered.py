"""A graph run op by op, every result counted by the meter."""

from __future__ import annotations

from typing import Any

from torch import fx

from cotrain_compile.machine import Tier
from cotrain_compile.runtime.meter import Meter


class MeteredInterpreter(fx.Interpreter):
    """Runs a graph on one tier; values are freed after their last use."""

    def __init__(self, module: fx.GraphModule, meter: Meter, tier: Tier) -> None:
        super().__init__(module)
        self._meter, self._tier = meter, tier

    def run_node(self, n: fx.Node) -> Any:
        result = super().run_node(n)
        if n.op == "call_function":
            self._meter.track(result, self._tier, n.name)
        return result

"""Rank exchanges: which parameters and gradients of a step ranks exchange together.

In: a step of one device whose gradients have the type of their parameters. Out: `Exchanges`. What
is small goes with the others of its layer, all else by itself. No torch.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from cotrain_compile.analysis.layers import layer
from cotrain_compile.dataflow import SMALL_EXCHANGE_BYTES, Dataflow, Role


@dataclass(frozen=True)
class Exchanges:
    """Those of `step`."""

    step: Dataflow

    @cached_property
    def gathered(self) -> Mapping[str, tuple[str, ...]]:
        """The parameters that are gathered together, by what holds them whole."""
        found = defaultdict[str, tuple[str, ...]](tuple)
        for buffer in self.step.buffers:
            if buffer.role is Role.PARAM:
                found[f"{self._bucket(buffer.name)}.whole"] += (buffer.name,)
        return found

    @cached_property
    def reduced(self) -> Mapping[str, Sequence[Sequence[str]]]:
        """The gradients that are reduced together, by the op that makes the last of them."""
        makers = {name: i for i, op in enumerate(self.step.ops) for name in op.writes}
        buckets = defaultdict[str, list[str]](list)
        for group in sorted(self.step.updates, key=lambda group: makers[group.gradient]):
            buckets[self._bucket(group.param)].append(group.gradient)
        found = defaultdict[str, list[Sequence[str]]](list)
        for bucket in buckets.values():
            found[self.step.ops[makers[bucket[-1]]].name].append(bucket)
        return found

    def _bucket(self, param: str) -> str:
        """What a parameter, and its gradient, are exchanged with."""
        is_small = self.step.buffer[param].nbytes <= SMALL_EXCHANGE_BYTES
        return f"small of {layer(param)}" if is_small and layer(param) else param

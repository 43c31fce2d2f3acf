"""Shared stages: several ranks have each stage of a pipeline, each for its share of the samples."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from math import ceil

from cotrain_compile.cluster.model.profiles import Layer, LayerProfile, Unit
from cotrain_compile.cluster.steps.stage_step import Does, Ring


@dataclass(frozen=True)
class SharedStages:
    """Ranks that run each stage on other samples, and the rings over which they exchange.

    Over `shard` each has a part of every layer, which is gathered for a step; over `data` gradients
    are summed, but those of `experts`, where they are divided, over `replicate`.
    """

    rings: Mapping[str, Ring] = field(default_factory=dict)
    experts: bool = False

    @property
    def parts(self) -> int:
        """In how many parts a layer rests between two steps."""
        return self.rings["shard"].ranks if "shard" in self.rings else 1

    def at_rest(self, profile: LayerProfile) -> LayerProfile:
        """The layers with parameters and gradients whole during a step, and their parts and those
        of states as what rests besides."""
        if self.parts == 1:
            return profile
        return replace(
            profile,
            layers=tuple(
                replace(
                    each,
                    state_bytes=ceil(
                        (each.param_bytes + each.grad_bytes + each.state_bytes) / self.parts
                    ),
                )
                for each in profile.layers
            ),
        )

    def own(self, layer: Layer) -> Layer:
        """What a rank updates of a layer."""
        return replace(
            layer,
            param_bytes=ceil(layer.param_bytes / self.parts),
            grad_bytes=ceil(layer.grad_bytes / self.parts),
            state_bytes=ceil(layer.state_bytes / self.parts),
        )

    def exchanges(self, unit: Unit) -> Iterator[tuple[Does, float, str]]:
        """What becomes of a unit's gradients behind the last backward."""
        own = unit.expert_grad_bytes if self.experts else 0.0
        if "shard" in self.rings:
            yield Does.SCATTER, unit.grad_bytes, "shard"
        for name, nbytes in (("data", unit.grad_bytes - own), ("replicate", own)):
            if name in self.rings and nbytes:
                yield Does.SUM, nbytes / self.parts, name


ALONE = SharedStages()

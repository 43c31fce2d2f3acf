"""Features of a published row: its step's seconds by class, at the preset's rates alone.

In: a row. Out: a `Feature`, of which a law makes seconds: a sum of what each class takes, times the
class's factor (`fit`). A row that was measured here has kernels' seconds by kind besides, each a
feature of its own: they say of one class alone what a step's seconds say of all together.
"""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from bench.published.steps import Row, Traced, traced_of
from cotrain_compile import presets
from cotrain_compile.analysis.costs import roofline
from cotrain_compile.dataflow import Dataflow, Phase, Role
from cotrain_compile.machine import Machine
from cotrain_compile.machine.op_classes import ATTENTION, FUSED, ONE_BY_ONE, RELAYOUT, OpKind
from cotrain_compile.presets.factors import constants_of

# Where gradients may have gradients, as in a step of one graph, autograd writes the backward of
# silu as ops that move 18 tensors, and eager has one that moves 3. One of them makes ones, which
# moves 2 and nothing else does.
_ONES = "aten.fill.Scalar"
_SILU_SURPLUS = 7.5
# What is not multiplied: the update, which is one loop over what it touches, and what crosses the
# link of states that a paged optimizer keeps and the card has no room for.
UPDATE = "update"
PAGED = "paged states"

# What the kernels of each kind in a row of ours run.
KERNELS: Mapping[str, frozenset[str]] = {
    "product": frozenset({OpKind.PRODUCT, OpKind.BATCHED_PRODUCT}),
    "attention": ATTENTION,
    "convolution": frozenset({OpKind.CONVOLUTION, OpKind.CHANNELS_LAST}),
    "memory": frozenset({ONE_BY_ONE, FUSED, RELAYOUT, UPDATE, PAGED}),
}

# Cards by how the rows name them; the first that fits. Of those that end in a number a preset.
_CARDS = {
    "RTX 3090": "rtx3090",
    "RTX 4090": "rtx4090",
    "RTX 4080": "rtx4080",
    "RTX 4070 Ti SUPER": "rtx4070ti-super",
    "RTX A6000": "a6000",
    "RTX 6000 Ada": "rtx6000-ada",
    "A10$": "a10",
    "A100 40GB PCIe": "a100-pcie-40",
    "A100 80GB PCIe": "a100-pcie-80",
    "A100 40GB": "a100-40",
    "A100": "a100-80",
    "H100 80GB PCIe": "h100-pcie",
    "H100": "h100",
    "H200": "h200",
    "GH200": "gh200",
    "V100 16GB": "v100-16",
    "V100": "v100-32",
    "L40S": "l40s",
    "L4": "l4",
    "T4": "t4",
    "A40": "a40",
}


@dataclass(frozen=True)
class Feature:
    """A row with the seconds of each class at rates alone; `machine` is the preset of its card."""

    row: Row
    machine: str
    seconds: Mapping[str, float]

    @property
    def measured_s(self) -> float:
        return float(self.row["step_ms"]) / 1e3

    @property
    def is_own(self) -> bool:
        """Whether it was measured here and not published."""
        return "kernels_ms" in self.row

    @property
    def kernels(self) -> list[Feature]:
        """Of each kind whose kernels were timed."""
        return [
            Feature(
                {**self.row, "id": f"{self.row['id']}, {kind}", "step_ms": ms},
                self.machine,
                {name: s for name, s in self.seconds.items() if name in KERNELS[kind]},
            )
            for kind, ms in self.row.get("kernels_ms", {}).items()
        ]

    @cached_property
    def parts(self) -> list[tuple[float, tuple[str, ...]]]:
        """The seconds of each kind, with the constants that multiply them."""
        card = presets.CARDS_BY_NAME[self.machine]
        return [(s, constants_of(kind, card)) for kind, s in self.seconds.items() if s]

    def predicted_s(self, law: Mapping[str, float]) -> float:
        """By the constants of a law; 1 where it has none."""
        return sum(
            seconds * math.prod(law.get(name, 1.0) for name in constants)
            for seconds, constants in self.parts
        )


def machine_of(row: Row) -> Machine:
    """The preset of the row's card, without factors."""
    name = next(name for words, name in _CARDS.items() if re.match(words, row["card"]))
    found = presets.find(name)
    return found.but(device=replace(found.device, factors={}))


def feature_of(row: Row) -> Feature | None:
    """None where the row has no seconds, or is of a step that is not here."""
    traced = traced_of(row)
    if traced is None or row["step_ms"] is None:
        return None
    machine = machine_of(row)
    steps = [_seconds(step, machine, bool(row["compiled"])) for step in traced.steps(machine)]
    seconds = of_all_layers(traced, steps)
    scale = row["batch"] / traced.batch
    grown = {name: s * (1.0 if name == UPDATE else scale) for name, s in seconds.items()}
    grown[UPDATE] = grown.get(UPDATE, 0.0) * traced.update_share
    if "state_bytes_a_parameter" in row:
        grown[PAGED] = _paged_s(row, traced, machine)
    return Feature(row, machine.name, grown)


def _paged_s(row: Row, traced: Traced, machine: Machine) -> float:
    """Seconds in which states that have no room beside all else come up, and others go down."""
    elements = [_parameters(step) for step in traced.steps(machine)]
    states = row["state_bytes_a_parameter"] * traced.grown(*elements)
    room = machine.device.capacity_bytes - row["peak_memory_gib"] * 2**30
    beyond: float = max(0.0, states - room)
    return beyond / min(machine.h2d.bytes_per_s, machine.d2h.bytes_per_s)


def _parameters(step: Dataflow) -> float:
    """Of a step wholly in bfloat16."""
    return sum(b.nbytes for b in step.buffers if b.role is Role.PARAM) / 2


def of_all_layers(traced: Traced, steps: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Seconds by class of all layers, from those of a step with few and one with one more."""
    if len(steps) == 1:
        return dict(steps[0])
    few, more = steps
    names = few.keys() | more.keys()
    return {name: traced.grown(few.get(name, 0.0), more.get(name, 0.0)) for name in sorted(names)}


def _seconds(step: Dataflow, machine: Machine, compiled: bool) -> Mapping[str, float]:
    """Seconds by class, each as the cost model has it with a factor of 1 for that class alone."""
    found: defaultdict[str, float] = defaultdict(float)
    memory = FUSED if compiled else ONE_BY_ONE
    costs = _costs(step, machine, compiled, {memory: 1.0})
    relayed = _costs(step, machine, compiled, {memory: 1.0, RELAYOUT: 1.0})
    updated = _costs(step, machine, True, {FUSED: 1.0})
    for op in step.ops:
        if op.phase is Phase.OPTIMIZER:
            found[UPDATE] += updated[op.name]
        else:
            found[op.kind.value if op.flops else memory] += costs[op.name]
            found[RELAYOUT] += relayed[op.name] - costs[op.name]
            if not compiled and op.target == _ONES and op.phase is Phase.BACKWARD:
                found[memory] -= _SILU_SURPLUS * costs[op.name]
    return found


def _costs(
    step: Dataflow, machine: Machine, compiled: bool, factors: Mapping[str, float]
) -> Mapping[str, float]:
    device = replace(machine.device, factors=factors)
    return roofline(step, machine.but(device=device, fuses_updates=compiled)).device_s

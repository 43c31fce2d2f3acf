"""Room: what a plan has alive on the device around its updates, and how much more would fit.

In: a Problem and a Plan. Out: bytes by op, from `residency`. For whoever runs updates in another
order than the plan's, below the peak that the step has anyway.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from cotrain_compile.placement.placed import place_plan
from cotrain_compile.placement.problem import Problem
from cotrain_compile.plan import Plan


class Room:
    """What a plan has alive on the device.

    By op there, `param_of` names the parameter that it updates, `used_bytes` is what is alive then;
    `peak_bytes` is the most that the step has alive, which `is_peak_in_updates` alone or not.
    """

    def __init__(self, problem: Problem, plan: Plan) -> None:
        placed = place_plan(problem, plan)
        self._program, slots = placed.program, placed.device_bytes
        on_device, updates = placed.program.slot, placed.dataflow.updates
        self.param_of = {n: g.param for g in updates for n in g.ops if n in on_device}
        self.used_bytes = {name: slots[slot] for name, slot in on_device.items()}
        self.peak_bytes = max(slots)
        others = (used for name, used in self.used_bytes.items() if name not in self.param_of)
        self.is_peak_in_updates = self.peak_bytes > max(others, default=0)
        self._instances = placed.instances

    def are_independent(self, updates: Sequence[Sequence[str]]) -> bool:
        """Whether no update, given by its ops, touches a buffer that another of them writes."""
        touched_by: dict[str, int] = {}
        written_by: dict[str, int] = {}
        for number, names in enumerate(updates):
            touched, written = self._touched(names), self._written(names)
            if any(touched_by.get(buffer, number) != number for buffer in written):
                return False
            if any(written_by.get(buffer, number) != number for buffer in touched):
                return False
            touched_by |= dict.fromkeys(touched, number)
            written_by |= dict.fromkeys(written, number)
        return True

    def freed_bytes(self, updates: Sequence[Sequence[str]]) -> list[int]:
        """Of updates that stand side by side, what each alone touches and was there before them.

        Where it is gone after them.
        """
        slots = [self._program.slot[name] for names in updates for name in names]
        first, end = min(slots), max(slots) + 1
        freed: Counter[str] = Counter()
        for held in self._instances:
            if held.first < first < held.last <= end:
                freed[held.buffer.name] += held.buffer.nbytes
        touched = [self._touched(names) for names in updates]
        users = Counter(buffer for buffers in touched for buffer in buffers)
        return [sum(freed[b] for b in buffers if users[b] == 1) for buffers in touched]

    def _touched(self, names: Sequence[str]) -> set[str]:
        ops = [self._program.ops[self._program.slot[name]] for name in names]
        return {buffer for op in ops for buffer in (*op.reads, *op.writes)}

    def _written(self, names: Sequence[str]) -> set[str]:
        return {b for name in names for b in self._program.ops[self._program.slot[name]].writes}

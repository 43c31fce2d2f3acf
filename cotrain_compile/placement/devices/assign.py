"""Assign: which device runs which op, where modules are given to devices (the stages of a model).

In: a Dataflow and the device of some modules. Out: the device of every op. Forward ops go with
their module, everything else with what it touches: a backward op with its parameter or with the
activation that it reads, an update with its parameter, the rest with what it reads.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from cotrain_compile.dataflow import PERSISTENT_ROLES, Dataflow, Op, Phase
from cotrain_compile.errors import PlanError


def stages(dataflow: Dataflow, device_of_module: Mapping[str, str]) -> dict[str, str]:
    """The device of each op, where modules whose path begins with a name are on its device.

    Of several names the longest counts. Raises `PlanError` where no op is in one of them.
    """
    by_length = sorted(device_of_module.items(), key=lambda item: -len(item[0]))
    for name, _ in by_length:
        if not any(_is_within(op.module, name) for op in dataflow.ops):
            known = sorted({op.module for op in dataflow.ops if op.module})
            raise PlanError(f"no op is in module {name!r}; modules are {', '.join(known[:8])}, ...")
    placed = _Placed(dataflow, dict(by_length))
    for op in dataflow.ops:
        placed.add(op)
    return placed.device_of


def _is_within(module: str, name: str) -> bool:
    return module == name or module.startswith(name + ".")


class _Placed:
    """The devices of the ops so far, and of what they have touched."""

    def __init__(self, dataflow: Dataflow, device_of_module: Mapping[str, str]) -> None:
        self.dataflow, self.modules = dataflow, device_of_module
        self.device_of: dict[str, str] = {}
        self.first = next(iter(device_of_module.values()))
        self.made: dict[str, str] = {}  # the device of what has been written
        self.order: dict[str, int] = {}  # in which it was
        self.kept: dict[str, str] = {}  # of what outlives the step
        self.used: dict[str, set[str]] = {}  # all devices whose forward touches a buffer
        self.param_of = {group.gradient: group.param for group in dataflow.updates}
        self.update_of = {name: group for group in dataflow.updates for name in group.ops}

    def add(self, op: Op) -> None:
        device = self.device_of[op.name] = self._device(op)
        for name in op.writes:
            self.made.setdefault(name, device)
            self.order.setdefault(name, len(self.order))
        for name in (*op.reads, *op.writes):
            if self.dataflow.buffer[name].role in PERSISTENT_ROLES:
                self.kept.setdefault(name, device)
            elif op.phase is Phase.FORWARD:
                self.used.setdefault(name, set()).add(device)

    def _device(self, op: Op) -> str:
        if op.name in self.update_of:
            group = self.update_of[op.name]
            return _first(self.kept, (group.param,)) or self.made.get(group.gradient, self.first)
        if op.phase is Phase.FORWARD:
            for name, device in self.modules.items():
                if _is_within(op.module, name):
                    return device
        params = [self.param_of[name] for name in op.writes if name in self.param_of]
        return (
            _first(self.made, op.writes)  # what is written has one device
            or _first(self.kept, (*op.reads, *op.writes, *params))
            or (self._activation(op) if op.phase is not Phase.FORWARD else "")
            or _first(self.made, self._latest_first(op.reads))
            or self.first
        )

    def _latest_first(self, names: Iterable[str]) -> list[str]:
        """A sum of gradients goes with the one made last: there the backward has got to."""
        return sorted(names, key=lambda name: -self.order.get(name, -1))

    def _activation(self, op: Op) -> str:
        """The device of what the forward has left for `op`, where that is of one device."""
        left = (self.used[name] for name in op.reads if name in self.used)
        return next((next(iter(devices)) for devices in left if len(devices) == 1), "")


def _first(devices: Mapping[str, str], names: Iterable[str]) -> str:
    return next((devices[name] for name in names if name in devices), "")

"""Parts: the table of options, in the four parts that rooms are given.

Each option is told here once: its name and type as it is read, its default, what a user may give,
what it is for, and what reads it. Keywords, help, schema and the page of options follow, or are
compared with it by tests.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from os import PathLike
from typing import Any, Literal, get_origin

from cotrain_compile.machine import Machine, Tier, default_budget
from cotrain_compile.options import parsers
from cotrain_compile.support.limits import processes_here
from cotrain_compile.support.units import Size

# What a choice may be: the one list of it, for what checks and for what is typed.
Device = Literal["cpu", "cuda"]
RestsOn = Literal["any", "host"]
Solver = Literal["highs", "cbc"]
Speculate = Literal["off", "auto", "on"]
Recompute = Literal["auto", "exact", "off"]
Checkpoints = Literal["respect", "dissolve"]
MicroBatchOrder = Literal["auto", "as-written", "by-layer"]
Split = Literal["auto", "off"]
Lowering = Literal["eager", "inductor"]
HostKernels = Literal["fused", "captured"]
OnBreak = Literal["error", "warn"]

# Of what is free on a drive, what states of all ranks of a computer may take by default.
FREE_SHARE = 0.9
# In one of so many steps ranks compare their parameters, which takes a pass over them.
CHECK_REPLICAS = 100
# No copy and no update of one parameter takes as long.
WATCHDOG_S = 600.0

_BYTES = int | float | str
_PATH = str | PathLike[str]


@dataclass(frozen=True)
class Option:
    """What a user may give for an option, what it is for, and what reads it."""

    name: str
    default: Any
    given: Any
    words: str
    parse: Callable[[Any], Any]


def _option(default: Any, given: Any, words: str, parse: Callable[[Any], Any] | None = None) -> Any:
    """A row of the table; flags, paths and choices are read as such unless `parse` is there."""
    if parse is None:
        plain = {bool: parsers.flag, _PATH: parsers.text}
        parse = parsers.one_of(given) if get_origin(given) is Literal else plain[given]
    return field(default=default, metadata={"given": given, "words": words, "parse": parse})


def table_of(part: Any) -> dict[str, Option]:
    """The options of a part, or of all parts, by name and in order."""
    return {item.name: Option(item.name, item.default, **item.metadata) for item in fields(part)}


@dataclass(frozen=True)
class PlanningOptions:
    """What a plan is for and how it is found. A budget of None is what the tier has.

    `plan` is the path of a saved plan, used in place of `policy`. `work_limit` is in units of two
    to three seconds of one core, `time_limit` in seconds, `gap` a fraction.
    """

    memory_budget: Size | None = _option(  # noqa: RUF009 - it makes a field()
        None, _BYTES, 'bytes on the device, "20GiB" or "80%"', Size.parse
    )
    host_memory_budget: Size | None = _option(  # noqa: RUF009
        None, _BYTES, "the same on the host", Size.parse
    )
    disk: str | None = _option(
        None, _PATH, "a folder on a drive, where what the host has no room for may rest"
    )
    disk_budget: Size | None = _option(  # noqa: RUF009
        None, _BYTES, "bytes on that drive, or a share of what is free there", Size.parse
    )
    machine: str = _option(
        "this-machine", _PATH, "a preset, or a file written by `cotrain-compile calibrate`"
    )
    profile: str | None = _option(None, _PATH, "a file with measured times of this step")
    policy: str = _option("auto", str, "the rule or solver that places the step", parsers.policy)
    rests_on: str = _option("any", RestsOn, "where parameters and states are between two calls")
    plan: str | None = _option(None, _PATH, "a file with the plan to use")
    plan_cache: bool = _option(True, bool, "keep plans on disk for the next process")
    solver: str = _option("highs", Solver, "what solves integer programs")
    work_limit: float = _option(7.0, float, "what a search may do, in units of work", parsers.units)
    time_limit: float = _option(
        300.0, float, "seconds until there is a plan, whatever is done", parsers.seconds
    )
    gap: float = _option(
        0.005, float, "a fraction: as near to the bound counts as solved", parsers.fraction
    )
    seed: int = _option(0, int, "what the solver begins with", parsers.seed)
    overlap_steps: bool = _option(False, bool, "defer host updates into the next step")
    speculate: str = _option("off", Speculate, "speculative host updates, before the norm is known")
    recompute: str = _option("auto", Recompute, "whether the plan may recompute values")
    micro_batch_order: str = _option("auto", MicroBatchOrder, "in which order micro-batches run")
    split: str = _option("auto", Split, "whether regions of the step, as its loss, run in parts")

    def budgets(self, machine: Machine) -> dict[Tier, int]:
        """Bytes allowed on each tier: what the user set, else what is planned for by default.

        On disk none unless `disk` or `disk_budget` is set.
        """
        device, host = self.memory_budget, self.host_memory_budget
        all_of_it = Size(fraction=1.0)
        return {
            Tier.DEVICE: device.of(machine.device.capacity_bytes)
            if device
            else default_budget.of_machine(machine),
            Tier.HOST: (host or all_of_it).of(machine.host.capacity_bytes),
            **({Tier.DISK: self._disk_bytes(machine)} if self.disk or self.disk_budget else {}),
        }

    def _disk_bytes(self, machine: Machine) -> int:
        """Of what is free in the folder, or where none is named of the machine's drive."""
        free_bytes = machine.disk.capacity_bytes if machine.disk is not None else 0
        if self.disk is not None and os.path.isdir(self.disk):
            free_bytes = shutil.disk_usage(self.disk).free
        return (self.disk_budget or Size(fraction=FREE_SHARE / processes_here())).of(free_bytes)


@dataclass(frozen=True)
class LoweringOptions:
    """How a step is captured, what its ops become and what they are compared with.

    `device` of None means where the model lives, `lowering` and `remat` of None what `lowering_on`
    and `remat_on` say. `verify` is in steps.
    """

    device: str | None = _option(None, Device, "where the step computes; else where the model is")
    checkpoints: str = _option(
        "respect", Checkpoints, "whether the step's checkpoints are followed"
    )
    lowering: str | None = _option(None, Lowering, "how ops on the device run")
    inductor: Mapping[str, Any] | None = _option(
        None, Mapping[str, Any], "settings of torch._inductor.config", parsers.settings
    )
    eager_segments: tuple[str, ...] = _option(
        (), Sequence[str], "segments that are not compiled, by name or pattern", parsers.names
    )
    remat: bool | None = _option(None, bool, "make cheap values again, as torch.compile does")
    host_kernels: str = _option("fused", HostKernels, "how updates on the host run")
    keep_grads: bool = _option(False, bool, "keep p.grad after the step")
    on_break: str = _option("error", OnBreak, "what to do with a step that cannot be captured")
    verify: int = _option(
        0, int, "steps that are compared with the step without its plan", parsers.count
    )

    @property
    def compiled(self) -> bool | None:
        """Whether ops run as compiled code, where the user says so."""
        return None if self.lowering is None else self.lowering == "inductor"

    def lowering_on(self, device_type: str) -> str:
        """How the ops of a device ("cuda", or "cpu" for the emulated one) run.

        The emulated device is there to check plans, so unless asked it runs what can be compared
        with eager bit by bit; so does a step that `verify` compares.
        """
        compiles = device_type == "cuda" and not self.verify
        return self.lowering or ("inductor" if compiles else "eager")

    def remat_on(self, device_type: str) -> bool:
        """Whether cheap forward values are made again: where that is fused into the backward."""
        return self.lowering_on(device_type) == "inductor" if self.remat is None else self.remat


@dataclass(frozen=True)
class RunningOptions:
    """How a device carries out its tasks. No `host_cores` leaves the host's threads unbound;
    `check_replicas` is in steps, `watchdog_s` in seconds of a copy or an update, None for ever.
    """

    host_cores: tuple[int, ...] = _option(
        (), Sequence[int], "the cores that host updates run on", parsers.cores
    )
    throttle: bool = _option(False, bool, "copies take as long as the machine's links say")
    timeline: bool = _option(False, bool, "time every op and copy on a card")
    poison: bool = _option(True, bool, "fill what a copy has not yet written with NaN")
    check_replicas: int = _option(
        CHECK_REPLICAS, int, "ranks compare their parameters every so many steps", parsers.count
    )
    watchdog_s: float | None = _option(
        WATCHDOG_S,
        float | Literal[False],
        "seconds after which a copy or an update is given up",
        parsers.patience,
    )


@dataclass(frozen=True)
class OutputOptions:
    """What is written and said; `live` is seconds between lines."""

    dump: str | None = _option(None, _PATH, "a folder for graph, plan and report")
    quiet: bool = _option(False, bool, "say nothing while compiling")
    live: float | None = _option(
        None, bool | float, "one line about the run, every so many seconds", parsers.interval
    )

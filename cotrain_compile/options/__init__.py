"""Options: what a user may pass to `torch.compile(..., backend="cotrain", options={...})`."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, fields
from typing import Any, Literal, get_args

from cotrain_compile.errors import OptionError, did_you_mean
from cotrain_compile.machine import LARGEST, Machine, Tier, default_budget
from cotrain_compile.placement.policies import RULES
from cotrain_compile.support.sizes import Size

# What a choice may be: the one list of it, for what checks and for what is typed.
Device = Literal["cpu", "cuda"]
RestsOn = Literal["any", "host"]
Solver = Literal["highs", "cbc"]
Speculate = Literal["off", "auto", "on"]
Recompute = Literal["auto", "exact", "off"]
Checkpoints = Literal["respect", "dissolve"]
MicroBatchOrder = Literal["auto", "as-written", "by-layer"]
Lowering = Literal["eager", "inductor"]
HostKernels = Literal["fused", "captured"]
OnBreak = Literal["error", "warn"]

# Seconds between the plain lines of `live=True`.
LIVE_S = 30.0
# In one of so many steps ranks compare their parameters, which takes a pass over them.
CHECK_REPLICAS = 100
# No copy and no update of one parameter takes as long.
WATCHDOG_S = 600.0


@dataclass(frozen=True)
class Options:
    """All options with their defaults; `docs/options.md` is the reference page.

    Budgets of None mean the capacity of the tier. `device` of None means where the model lives,
    `lowering` and `remat` of None what `lowering_on` and `remat_on` say. `plan` is the path of a
    saved plan, used in place of `policy`; with `plan_cache` plans are kept on disk for the next
    process. `work_limit` is in units of about a second of one core, `time_limit` in seconds, `gap`
    a fraction, `verify` and `check_replicas` in steps; `live` is seconds between lines,
    `watchdog_s` seconds of a copy or an update, None for none. No `host_cores` leaves the host's
    threads unbound.
    """

    memory_budget: Size | None = None
    host_memory_budget: Size | None = None
    device: str | None = None
    policy: str = "auto"
    rests_on: str = "any"
    plan: str | None = None
    plan_cache: bool = True
    solver: str = "highs"
    work_limit: float = 20.0
    time_limit: float = 300.0
    gap: float = 0.005
    seed: int = 0
    overlap_steps: bool = False
    speculate: str = "off"
    recompute: str = "auto"
    checkpoints: str = "respect"
    micro_batch_order: str = "auto"
    lowering: str | None = None
    inductor: Mapping[str, Any] | None = None
    eager_segments: tuple[str, ...] = ()
    remat: bool | None = None
    host_kernels: str = "fused"
    host_cores: tuple[int, ...] = ()
    keep_grads: bool = False
    on_break: str = "error"
    dump: str | None = None
    quiet: bool = False
    live: float | None = None
    machine: str = "this-machine"
    throttle: bool = False
    timeline: bool = False
    poison: bool = True
    profile: str | None = None
    verify: int = 0
    check_replicas: int = CHECK_REPLICAS
    watchdog_s: float | None = WATCHDOG_S

    @classmethod
    def parse(cls, options: Mapping[str, Any]) -> Options:
        """Check a user's dictionary. Raises `OptionError` naming the key and what it may be."""
        if not isinstance(options, Mapping) or not all(isinstance(key, str) for key in options):
            raise OptionError(
                f"options are {options!r}, but must be a dictionary of options by name, such as "
                '{"memory_budget": "20GiB"}'
            )
        defaults = {item.name: item.default for item in fields(cls)}
        known = list(defaults)
        values: dict[str, Any] = {}
        for key, value in options.items():
            if key not in known:
                meant = did_you_mean(key, known)
                raise OptionError(f"unknown option {key!r}{meant}; options are {', '.join(known)}")
            if type(value) is type(defaults[key]) and value == defaults[key]:
                continue  # as if it were left out
            try:
                values[key] = _PARSERS[key](value)
            except ValueError as error:
                raise OptionError(f"option {key!r} is {value!r}, but must be {error}") from None
        if values.get("verify") and values.get("lowering") == "inductor":
            raise OptionError(
                "option 'verify' compares bit by bit, which compiled ops do not allow; verify the "
                "plan with lowering 'eager', then leave 'verify' out"
            )
        return cls(**values)

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

    def budgets(self, machine: Machine) -> dict[Tier, int]:
        """Bytes allowed on each tier: what the user set, else what is planned for by default."""
        device, host = self.memory_budget, self.host_memory_budget
        all_of_it = Size(fraction=1.0)
        return {
            Tier.DEVICE: device.of(machine.device.capacity_bytes)
            if device
            else default_budget.of_machine(machine),
            Tier.HOST: (host or all_of_it).of(machine.host.capacity_bytes),
        }


@contextmanager
def as_option_error(option: str, value: str) -> Iterator[None]:
    """Turns an OSError met inside into an `OptionError` about `option`, whose path is `value`."""
    try:
        yield
    except OSError as error:
        raise OptionError(f"option {option!r} is {value!r}: {error.strerror}") from error


def _one_of(choices: Any) -> Callable[[object], str]:
    """What reads one of `choices`, a `Literal`."""
    allowed: tuple[str, ...] = get_args(choices)

    def parse(value: object) -> str:
        if value not in allowed:
            raise ValueError(
                f"one of {', '.join(map(repr, allowed))}{did_you_mean(value, allowed)}"
            )
        return str(value)

    return parse


def _text(value: object) -> str:
    value = os.fspath(value) if isinstance(value, os.PathLike) else value
    if not isinstance(value, str) or not value:
        raise ValueError("a non-empty string")
    return value


def _flag(value: object) -> bool:
    if not isinstance(value, bool):
        raise ValueError("True or False")
    return value


def _units(value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value <= LARGEST:
        raise ValueError("a number above 0: about seconds of one core")
    return float(value)


def _seconds(value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value <= LARGEST:
        raise ValueError("a number of seconds above 0")
    return float(value)


def _fraction(value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < 1:
        raise ValueError("a fraction from 0 to below 1, such as 0.01")
    return float(value)


def _interval(value: object) -> float | None:
    if isinstance(value, bool):
        return LIVE_S if value else None
    if not isinstance(value, int | float) or not 0 < value <= LARGEST:
        raise ValueError("True, False or a number of seconds above 0")
    return float(value)


def _patience(value: object) -> float | None:
    if value is False or value is None:
        return None
    try:
        return _seconds(value)
    except ValueError:
        raise ValueError("a number of seconds above 0, or False") from None


def _count(value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= LARGEST:
        raise ValueError("a number of steps, 0 or more")
    return value


def _seed(value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < 2**31:
        raise ValueError("an integer from 0 to 2147483647")
    return value


def _settings(value: object) -> Mapping[str, Any]:
    if not isinstance(value, Mapping) or not all(isinstance(key, str) for key in value):
        raise ValueError("a dictionary of settings by name")
    return dict(value)


def _names(value: object) -> tuple[str, ...]:
    names = value if isinstance(value, list | tuple) else None
    if names is None or not all(isinstance(name, str) and name for name in names):
        raise ValueError("a list of non-empty strings")
    return tuple(names)


def _cores(value: object) -> tuple[int, ...]:
    ours = sorted(os.sched_getaffinity(0))
    cores = value if isinstance(value, list | tuple | range) else ()
    if not cores or not all(type(core) is int and core in ours for core in cores):
        shown = ", ".join(map(str, ours))
        raise ValueError(f"a list of core numbers, of the cores of this process ({shown})")
    return tuple(sorted(set(cores)))


POLICIES = (
    "auto",
    *RULES,
    "fraction:auto",
    "greedy",
    "lp-round",
    "ilp",
    "autotm-static",
    "autotm-synchronous",
    "autotm-asynchronous",
)


def _policy(value: object) -> str:
    text = str(value)
    if text in POLICIES:
        return text
    match = re.fullmatch(r"fraction:(\d*\.?\d+)", text)
    if match is None or not 0 <= float(match[1]) <= 1:
        near = did_you_mean(text, POLICIES)
        raise ValueError(f"one of {', '.join(POLICIES)}, or fraction:F with F from 0 to 1{near}")
    return text


_PARSERS: dict[str, Callable[[Any], Any]] = {
    "memory_budget": Size.parse,
    "host_memory_budget": Size.parse,
    "device": _one_of(Device),
    "policy": _policy,
    "rests_on": _one_of(RestsOn),
    "plan": _text,
    "plan_cache": _flag,
    "solver": _one_of(Solver),
    "work_limit": _units,
    "time_limit": _seconds,
    "gap": _fraction,
    "seed": _seed,
    "overlap_steps": _flag,
    "speculate": _one_of(Speculate),
    "recompute": _one_of(Recompute),
    "checkpoints": _one_of(Checkpoints),
    "micro_batch_order": _one_of(MicroBatchOrder),
    "lowering": _one_of(Lowering),
    "inductor": _settings,
    "eager_segments": _names,
    "remat": _flag,
    "host_kernels": _one_of(HostKernels),
    "host_cores": _cores,
    "keep_grads": _flag,
    "on_break": _one_of(OnBreak),
    "dump": _text,
    "quiet": _flag,
    "live": _interval,
    "machine": _text,
    "throttle": _flag,
    "timeline": _flag,
    "poison": _flag,
    "profile": _text,
    "verify": _count,
    "check_replicas": _count,
    "watchdog_s": _patience,
}

"""Placement and Plan: what was decided, and when everything moves.

A `Placement` says where buffers live and where updates run. A `Plan` adds the asynchronous tasks
(transfers and host updates) with the ops they are issued after and waited for before, what it is
predicted to take (`timeline`) and how it was found (`report`). No torch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Literal

from cotrain_compile.machine import Rates, Tier
from cotrain_compile.plan.report import Milestone, SolveReport
from cotrain_compile.plan.timeline import Span, Timeline

__all__ = [
    "HostRegion",
    "Lane",
    "Milestone",
    "MovedOps",
    "Placement",
    "Plan",
    "SolveReport",
    "Span",
    "Task",
    "Timeline",
    "Transfer",
    "UpdateMode",
    "carried_out",
]

FORMAT_VERSION = 3


class UpdateMode(StrEnum):
    """The ways to update a parameter.

    RESIDENT: states and update on the device. STREAMED: states at home on the host, updated on the
    device; the parameter may be at home on either. HOST: states at home on the host, updated there.
    HOST_STREAMED: as HOST with the parameter at home on the host too, on the device only while it
    is used.
    """

    RESIDENT = "resident"
    STREAMED = "streamed"
    HOST = "host"
    HOST_STREAMED = "host_streamed"


class Lane(StrEnum):
    """The lanes of a machine with one device, `Machine.lanes`: work on one lane runs in order.

    The network is one of them where the machine has one, and so are the two ways of a drive.
    """

    DEVICE = "device"
    HOST = "host"
    D2H = "d2h"
    H2D = "h2d"
    NETWORK = "network"
    DISK_READ = "disk_read"
    DISK_WRITE = "disk_write"


@dataclass(frozen=True)
class Placement:
    """Which tier each persistent buffer rests on between steps, and how each parameter is updated.

    `homes` has one entry for every buffer with a persistent role (on disk may rest what the host
    updates, frozen parameters, and gradients kept in `.grad`: what uses them reads them, piece by
    piece); `updates` one for every update group, by parameter name. A parameter at home off the
    device is fetched for its uses: itself, or the low-precision copy of its group, which the host
    then makes unless all are `fetched_whole`, as by systems that know of no casts. With
    `casts_once` that copy serves all uses in the step, in place of equal ones that autocast makes
    for each micro-batch and in a checkpoint's second forward (`placement.casts`). `offloaded` names
    what leaves the device in the longest gap between two uses, from forward to backward:
    activations, and such fetched weights, which are then fetched twice. Activations that are
    `refetched`, too, are gone once more, in the longest gap behind that, and come back from the
    same copy. The copies of those that are `offloaded_to_disk`, too, rest on disk. With
    `early_updates` an update, wherever it runs, starts as soon as its gradient allows, otherwise
    after the backward. With `overlap_steps` an update on the host and its weight's way back may end
    in the next step (`Task.deferred`). The updates of `speculative` parameters, all on the host,
    begin before the values are there that mostly change nothing (`guesses`). `recomputed` names
    forward values that are made again for the backward; tasks are those of the step in which they
    are. Those `recomputed_apart`, too, have copies of their own of what they are made of, which run
    once more for whoever else needs them. With `layers_per_pack` above 0 its micro-batches run
    layer by layer, in packs of so many. `splits` says in how many parts a region of the step runs,
    by its name: everything else is said of the step in parts. Streamed updates go in pieces of
    `piece_bytes` of the parameter where they can (`placement.pieces`); 0: as wholes. `policy` is
    the name of the rule or solver that chose.
    """

    policy: str
    homes: Mapping[str, Tier]
    updates: Mapping[str, UpdateMode]
    offloaded: tuple[str, ...] = ()
    early_updates: bool = False
    overlap_steps: bool = False
    recomputed: tuple[str, ...] = ()
    speculative: tuple[str, ...] = ()
    layers_per_pack: int = 0
    splits: Mapping[str, int] = field(default_factory=dict)
    piece_bytes: int = 0
    refetched: tuple[str, ...] = ()
    fetched_whole: bool = False
    offloaded_to_disk: tuple[str, ...] = ()
    casts_once: bool = False
    recomputed_apart: tuple[str, ...] = ()

    @property
    def uses_disk(self) -> bool:
        """Whether anything rests on disk, or is there for a part of a step."""
        return bool(self.offloaded_to_disk) or Tier.DISK in self.homes.values()

    def is_off_device(self, name: str) -> bool:
        """Whether a persistent buffer rests on the host or on disk."""
        return self.homes.get(name, Tier.DEVICE) is not Tier.DEVICE


@dataclass(frozen=True)
class Transfer:
    """One copy between tiers.

    It is issued when op `issue_after` has been issued (None: at the start of the step), starts when
    the tasks in `after` are done, and is waited for before op `wait_before` (None: at the end of
    the step). The source of an offload is kept until that wait, so that memory does not depend on
    how fast a copy happens to be. A prefetch reads the host home of `buffer`, or where that is not
    on the host, the copy an earlier task left there. `destination` is "" for a fresh copy of
    `buffer` on the other tier, or the name of an existing buffer that is overwritten there (a
    state or parameter written back to its home, a new parameter moved over the old one). From the
    wait for a fresh prefetch on, ops that touch `buffer` touch that copy. A `buffer` that is a
    piece is copied from, and over, its part of the whole on the host.

    A task that is `deferred` may end in the next step: `wait_before` is then an op of that step,
    and never None. Only host updates and the ways back of their weights are deferred. Tasks in
    `after_previous` are deferred ones of the step before, which must be done before this one
    starts.

    Between two ops things happen in this order: all but fresh prefetches is issued, offloads are
    waited for, fresh prefetches are issued (and take their memory), the rest is waited for.

    Tasks with the same `bundle`, the name of the first of them, are carried out as one: they are
    neighbours among the tasks of a plan, of one kind, issued and waited for at the same places, and
    begin when all that any of them comes after is done. "" is a task by itself.
    """

    name: str
    direction: Literal["offload", "prefetch"]
    buffer: str
    nbytes: int
    issue_after: str | None
    wait_before: str | None
    after: tuple[str, ...] = ()
    destination: str = ""
    deferred: bool = False
    after_previous: tuple[str, ...] = ()
    bundle: str = ""
    kind: Literal["transfer"] = "transfer"

    def between(self, issue_after: str | None, wait_before: str | None) -> Transfer:
        """The same, issued and waited for there."""
        return Transfer(
            self.name,
            self.direction,
            self.buffer,
            self.nbytes,
            issue_after,
            wait_before,
            self.after,
            self.destination,
            self.deferred,
            self.after_previous,
            self.bundle,
        )

    @property
    def lane(self) -> Lane:
        match self.direction:
            case "offload":
                return Lane.D2H
            case "prefetch":
                return Lane.H2D

    @property
    def ends(self) -> tuple[Tier, Tier]:
        """The spaces that it copies from and to."""
        match self.direction:
            case "offload":
                return Tier.DEVICE, Tier.HOST
            case "prefetch":
                return Tier.HOST, Tier.DEVICE

    @property
    def is_offload(self) -> bool:
        """Whether it copies from the device."""
        return self.direction == "offload"

    @property
    def is_fetch(self) -> bool:
        """Whether it makes a fresh copy on the device."""
        return self.direction == "prefetch" and not self.destination


@dataclass(frozen=True)
class HostRegion:
    """Ops of one parameter, run on the host from what is there (see `Transfer` for timing).

    `ops` are those of its update group, in program order; or, where `makes` is not "", the cast
    that makes this low-precision copy of a parameter at home on the host.

    With `guesses` it is a speculative update: it saves what it overwrites and runs with neutral
    values (1, False) in place of those that are named. The update that `confirms` it, by its name,
    has them: where they are neutral nothing is left to do, else it runs on what was saved.
    """

    name: str
    param: str
    ops: tuple[str, ...]
    issue_after: str | None
    wait_before: str | None
    after: tuple[str, ...] = ()
    makes: str = ""
    deferred: bool = False
    after_previous: tuple[str, ...] = ()
    guesses: tuple[str, ...] = ()
    confirms: str = ""
    bundle: str = ""
    kind: Literal["host_region"] = "host_region"

    def between(self, issue_after: str | None, wait_before: str | None) -> HostRegion:
        """The same, issued and waited for there."""
        return HostRegion(
            self.name,
            self.param,
            self.ops,
            issue_after,
            wait_before,
            self.after,
            self.makes,
            self.deferred,
            self.after_previous,
            self.guesses,
            self.confirms,
            self.bundle,
        )

    @property
    def lane(self) -> Lane:
        return Lane.HOST

    @property
    def is_offload(self) -> bool:
        """Never: what it reads and writes is on the host, as of `Transfer`."""
        return False

    @property
    def is_fetch(self) -> bool:
        """Never: see `is_offload`."""
        return False


# Closed: who has to know the kind matches on it to the end (`assert_never`).
Task = Transfer | HostRegion


def carried_out(tasks: Sequence[Task]) -> list[list[Task]]:
    """`tasks` in their order, each by itself or with all of its bundle: what is started at once."""
    found: list[list[Task]] = []
    for task in tasks:
        if task.bundle and found and found[-1][0].bundle == task.bundle:
            found[-1].append(task)
        else:
            found.append([task])
    return found


@dataclass(frozen=True)
class MovedOps:
    """Ops that the device runs right after op `after`, not at their own place in the step.

    `after` is an op that stays at its place, None for the start of the step. Ops moved to one place
    keep the order of the plan.
    """

    ops: tuple[str, ...]
    after: str | None


@dataclass(frozen=True)
class Plan:
    """A placement with its schedule.

    `tasks` are in the order of issue; `moved` are the ops that run elsewhere than where the step
    has them. Where tasks are deferred, `predicted` is a step in the steady state. `budgets` are the
    bytes that each tier was allowed; `fingerprint` is that of the Dataflow it was made for. `notes`
    say in words what was asked for and not done, or done otherwise. `rates` say where those of the
    machine come from: what is predicted at guessed ones is a guess.
    """

    fingerprint: str
    machine: str
    budgets: Mapping[Tier, int]
    placement: Placement
    tasks: tuple[Task, ...]
    predicted: Timeline
    notes: tuple[str, ...] = ()
    moved: tuple[MovedOps, ...] = ()
    report: SolveReport | None = None
    rates: Rates = Rates.GIVEN

    @property
    def tiers(self) -> tuple[Tier, ...]:
        """The tiers that it has a budget for."""
        return tuple(tier for tier in Tier if tier in self.budgets)

    @property
    def on_machine(self) -> str:
        """The machine, and where its rates come from unless they were measured."""
        return f"{self.machine}{self.rates.words}"

    @property
    def foreseen(self) -> str:
        """What `predicted` may be called: at guessed rates it is a guess."""
        return "guessed" if self.rates is Rates.GUESSED else "predicted"

    @property
    def transfers(self) -> tuple[Transfer, ...]:
        return tuple(task for task in self.tasks if isinstance(task, Transfer))

    @property
    def host_regions(self) -> tuple[HostRegion, ...]:
        return tuple(task for task in self.tasks if isinstance(task, HostRegion))

    @property
    def deferred(self) -> tuple[Task, ...]:
        """The tasks that may end in the next step."""
        return tuple(task for task in self.tasks if task.deferred)

    @property
    def host_updates(self) -> tuple[HostRegion, ...]:
        """The host regions that update their parameter for good."""
        return tuple(r for r in self.host_regions if not (r.makes or r.guesses))

    @property
    def speculations(self) -> tuple[HostRegion, ...]:
        """The host regions that update their parameter on guesses."""
        return tuple(region for region in self.host_regions if region.guesses)

    def bytes_moved(self, direction: Literal["offload", "prefetch"]) -> int:
        """Bytes over the link in one direction in one step."""
        return sum(t.nbytes for t in self.transfers if t.direction == direction)

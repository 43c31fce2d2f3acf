"""Harmony's tasks: forward, backward and update of packs, and the device that runs each.

In: a layout, the micro-batch sizes and packings of both passes (`HarmonyChoice`), the samples of a
step and the devices. Out: `TaskGraph`. Each task runs all of its micro-batches back to back, so its
weights cross the link once, and an update follows its backward. A backward makes its pack's forward
again from the pack's input, which rests on the host; the last pack of the backward has no forward
task: its own forward, with the loss, is enough.
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property
from itertools import accumulate

from cotrain_compile.cluster.harmony_packs import Pack, Packs


class Layout(StrEnum):
    """Who runs which tasks.

    DATA_PARALLEL: every device all packs on its share of the samples, gradients are reduced over
    all. PIPELINE: one copy of the model, whose tasks are dealt to the devices in turn.
    """

    DATA_PARALLEL = "harmony-dp"
    PIPELINE = "harmony-pp"


@dataclass(frozen=True)
class HarmonyChoice:
    """What is searched: samples of a micro-batch and packs, forward and backward.

    The packs of the forward end where the last pack of the backward begins.
    """

    forward_samples: int
    forward_packs: Packs
    backward_samples: int
    backward_packs: Packs


class TaskKind(StrEnum):
    """What a task does with its pack."""

    FORWARD = "forward"
    BACKWARD = "backward"
    UPDATE = "update"


@dataclass(frozen=True)
class Task:
    """`pack` on `device`, micro-batch by micro-batch; `number` is its place in the step."""

    number: int
    kind: TaskKind
    pack: Pack
    device: int
    micro_batches: tuple[int, ...] = ()

    @property
    def name(self) -> str:
        """Its kind and its layers."""
        return f"{self.kind} {self.pack.first}-{self.pack.last - 1}"


@dataclass(frozen=True)
class TaskGraph:
    """All tasks of a step, in order; under data parallelism those of the first device.

    The first device has the most samples, and all others do the same beside it.
    """

    layout: Layout
    choice: HarmonyChoice
    devices: int
    tasks: tuple[Task, ...]

    @cached_property
    def sequence(self) -> tuple[Task, ...]:
        """Forwards and backwards."""
        return tuple(task for task in self.tasks if task.kind is not TaskKind.UPDATE)

    @cached_property
    def _places(self) -> dict[int, int]:
        return {task.number: place for place, task in enumerate(self.sequence)}

    @cached_property
    def _stashed(self) -> dict[int, tuple[Task, ...]]:
        """By the number of each forward; the layers of its packs rise."""
        backwards = [task for task in self.sequence if task.kind is TaskKind.BACKWARD]
        backwards.sort(key=lambda task: task.pack)
        return {
            task.number: tuple(
                reader
                for reader in backwards
                if task.pack.first <= reader.pack.first < task.pack.last
            )
            for task in self.sequence
            if task.kind is TaskKind.FORWARD
        }

    @cached_property
    def _forwards(self) -> dict[int, Task]:
        by_number = {task.number: task for task in self.sequence}
        return {
            reader.number: by_number[number]
            for number, readers in self._stashed.items()
            for reader in readers
        }

    def next_of(self, task: Task) -> Task | None:
        """Which task reads what this forward or backward makes; None for the last one."""
        place = self._places[task.number] + 1
        return self.sequence[place] if place < len(self.sequence) else None

    def before(self, task: Task) -> Task | None:
        """Which task makes what this forward or backward reads; None for the first one."""
        place = self._places[task.number]
        return self.sequence[place - 1] if place else None

    def stashed(self, forward: Task) -> tuple[Task, ...]:
        """The backwards whose inputs this forward sends to the host, in order of their layers."""
        return self._stashed[forward.number]

    def forward_of(self, backward: Task) -> Task:
        """The forward that sends the input of this backward's pack to the host."""
        return self._forwards[backward.number]

    def has_loss(self, task: Task) -> bool:
        """Whether it is the backward that begins with the loss."""
        return task.kind is TaskKind.BACKWARD and task.pack == self.choice.backward_packs[-1]

    @property
    def shares_host(self) -> bool:
        """Whether devices update beside each other; data parallelism updates one copy, once."""
        return self.layout is Layout.PIPELINE

    @property
    def converts(self) -> bool:
        """Whether micro-batches of the backward are others than those of the forward."""
        return self.choice.forward_samples != self.choice.backward_samples


def micro_batches(samples: int, each: int) -> tuple[int, ...]:
    """`samples` in micro-batches of `each`, with what is left over as the last one."""
    whole, rest = divmod(samples, each)
    return (each,) * whole + ((rest,) if rest else ())


def made_by(forward: tuple[int, ...], backward: tuple[int, ...]) -> tuple[int, ...]:
    """Of each micro-batch of the backward, the one of the forward with which it is complete."""
    made = list(accumulate(forward))
    return tuple(bisect_left(made, needed) for needed in accumulate(backward))


def task_graph(layout: Layout, choice: HarmonyChoice, samples: int, devices: int) -> TaskGraph:
    """The tasks of a step of so many samples."""
    packs = len(choice.forward_packs) + len(choice.backward_packs)
    if layout is Layout.DATA_PARALLEL or devices == 1:
        share = -(-samples // devices) if layout is Layout.DATA_PARALLEL else samples
        dealt = [0] * packs
        used = devices
    else:
        share = samples
        dealt = [place % devices for place in range(packs)]
        used = min(devices, packs)
    tasks: list[Task] = []
    places = iter(dealt)
    sizes = micro_batches(share, choice.forward_samples)
    for pack in choice.forward_packs:
        tasks.append(Task(len(tasks), TaskKind.FORWARD, pack, next(places), sizes))
    sizes = micro_batches(share, choice.backward_samples)
    for pack in reversed(choice.backward_packs):
        device = next(places)
        tasks.append(Task(len(tasks), TaskKind.BACKWARD, pack, device, sizes))
        tasks.append(Task(len(tasks), TaskKind.UPDATE, pack, device))
    return TaskGraph(layout, choice, used, tuple(tasks))

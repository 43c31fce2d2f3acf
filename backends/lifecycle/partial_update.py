"""PartialUpdate: tensors that a failed step has left apart from the rest, and how that is said.

In: the writes of a step and the tasks that were to carry them out. Out: `Damage` in words, and
`PartialUpdate`, which knows whether the tensors have been loaded since.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from cotrain_compile.backends.eager.calls import Write
from cotrain_compile.runtime.lanes import Task

GO_ON = "load the last checkpoint before going on"


@dataclass(frozen=True)
class Damage:
    """Names of the tensors that are one step ahead of the rest, or may be half written.

    `statistics` are those that the forward has updated; alone they are no damage, as in eager.
    """

    ahead: tuple[str, ...] = ()
    half: tuple[str, ...] = ()
    statistics: tuple[str, ...] = ()

    @property
    def names(self) -> tuple[str, ...]:
        return (*self.ahead, *self.half)

    def text(self, what: str) -> str:
        """What `what` has left, in words; "" where that is nothing."""
        said = []
        if self.ahead:
            said.append(
                f"{len(self.ahead)} tensors are one step ahead of the rest ({few(self.ahead)})"
            )
        if self.half:
            said.append(f"{len(self.half)} tensors may be half written ({few(self.half)})")
        if not said:
            return ""
        if self.statistics:
            said.append(f"its forward has updated {few(self.statistics)}")
        return f"{what} failed while it updated: {' and '.join(said)}; {GO_ON}"


def damage_by(
    written: Sequence[Write], tasks: Mapping[str, Task], ended: int | None = None
) -> Damage:
    """What a step that failed has left of the updates in `written`; `tasks` have all ended.

    The nodes of the first `ended` writes came to their end, all where nothing is said.
    """
    # A tensor is written more than once where it was half written before it, or is after it.
    ahead, half, statistics = dict[str, None](), dict[str, None](), dict[str, None]()
    parts: dict[str, int] = {}  # that were written whole
    for number, write in enumerate(written):
        task = tasks.get(write.task) if write.task is not None else None
        if write.task is None:
            is_whole = ended is None or number < ended
        elif task is None or not (task.ran or task.broke_off):
            continue
        else:
            is_whole = task.ran
        if not write.is_update:
            statistics[write.name] = None
        elif not is_whole:
            half[write.name] = None
        else:
            ahead[write.name] = None
            parts[write.name] = parts.get(write.name, 0) + 1
    half |= {w.name: None for w in written if 0 < parts.get(w.name, 0) < w.parts}
    return Damage(tuple(name for name in ahead if name not in half), tuple(half), tuple(statistics))


class PartialUpdate:
    """Tensors by name that a failed step has left apart from the rest, until they are loaded.

    A write to a tensor raises its version. So does AOTAutograd, by one, each time before it calls
    the step; what has risen further since the failure was written.
    """

    def __init__(self, tensors: Mapping[str, torch.Tensor]) -> None:
        self._calls = 0
        self.left = {
            name: (weakref.ref(tensor.untyped_storage()), tensor._version)
            for name, tensor in tensors.items()
        }

    def names(self, tensors: Mapping[str, Any]) -> list[str]:
        """Those that are in `tensors` as they were left; to be asked once in every call."""
        self._calls += 1
        return [
            name
            for name, (storage, version) in self.left.items()
            if tensors[name].untyped_storage() is storage()
            and tensors[name]._version <= version + self._calls
        ]


def few(names: Sequence[str]) -> str:
    """The first of `names`, for a message."""
    return ", ".join(names[:5]) + (", ..." if len(names) > 5 else "")

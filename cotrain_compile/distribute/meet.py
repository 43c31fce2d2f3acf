"""Meeting: ranks make sure that all of them are at the same point before they exchange anything.

A `Meeting` is a group on CPUs beside those of the user's. Each rank brings a key, which is of equal
length for all, so that any two points can meet: one all-reduce tells whether all keys are equal.
Where they are not, all ranks learn what each of them is about to do, or how it failed, and every
one of them raises `RanksApart`. So a rank that alone has failed, or compiles anew, is an error on
every rank as soon as the others come to their next exchange, not when a timeout is over.

Private torch API used: `torch._dispatch.python.no_python_dispatcher`, as ranks meet within a trace;
`ProcessGroup._device_types`, `._get_backend` and `.options._timeout`, as nothing public says after
what time a group gives up; and the options of its collectives, which C++ defines. Tried on torch
2.13.0.
"""

from __future__ import annotations

import datetime
import functools
import hashlib
from collections.abc import Callable
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import AllgatherOptions, AllreduceOptions
from torch._dispatch.python import no_python_dispatcher

from cotrain_compile.errors import CotrainError, ExchangeFailed, RanksApart

# No rank plans for longer, and no group is waited for longer.
LONGEST = datetime.timedelta(minutes=10)
# A rank that has failed waits so long for the others to learn of it, before it raises its error.
TELLING = datetime.timedelta(seconds=10)
_TOLD_BYTES = 2048
_FAILED = "failed"
# What ranks that differ are told.
SAME_BATCHES = (
    "Run the same code on every rank, on batches of one shape: leave a smaller last batch out "
    "(DataLoader with drop_last=True), or pad the last batch to it"
)
# What a rank adds to what it does, where its last step failed between two exchanges.
AFTER_EXCHANGE = "after a step that failed at exchange"
LEFT_APART = (
    "A step that failed has left them at different exchanges, of which the others wait for one: "
    "start all ranks again from a checkpoint"
)


class Meeting:
    """The ranks of one group. What it knows of this rank's steps is shared by all of them.

    `exchanges` are the collectives that the step which runs has begun on this rank; `left_at` is
    how many a step had begun that failed in between, None where the last one did not. A rank goes
    on after a failure only if all have failed at the same exchange.
    """

    def __init__(self, group: Any) -> None:
        self._group = group
        self._is_lost = False
        self.exchanges = 0
        self.left_at: int | None = None

    @property
    def ranks(self) -> int:
        return dist.get_world_size(self._group)

    @property
    def rank(self) -> int:
        return dist.get_rank(self._group)

    def meet(
        self,
        key: str,
        tell: Callable[[], str],
        wait: datetime.timedelta | None = None,
        values: str = "",
    ) -> bool:
        """Return when every rank has come with the same `key`; `tell` says what this one does.

        Returns whether all have brought the same `values`, too. Raises `RanksApart` on every rank
        where keys differ, and `ExchangeFailed` where a rank does not come within the group's
        timeout, or within `wait`.
        """
        if self._is_lost:
            raise ExchangeFailed(
                "this rank has failed before, and the others could not be told; start all ranks "
                "again from a checkpoint"
            )
        try:
            apart, same_values = self._compare(key, wait, values=values)
        except RuntimeError as error:
            self._is_lost = True
            raise ExchangeFailed(
                "another rank has failed, hangs, or did not come to this point: "
                f"{first_line(error)}. This rank {tell()}. Look at the first error of "
                "the other ranks; start all ranks again from a checkpoint"
            ) from error
        if apart:
            self._raise_apart(tell())
        return same_values

    def tell_failure(self, error: BaseException) -> None:
        """Let the others know that this rank has failed at a point where they may still meet it."""
        if self._is_lost or isinstance(error, RanksApart | ExchangeFailed):
            return
        told = f"{_FAILED}: {type(error).__name__}: {error}"
        try:
            if self._compare(_FAILED, None, TELLING)[0]:
                self._what_each_does(told)
        except RuntimeError:
            self._is_lost = True
            error.add_note(
                "The other ranks have not come to where they would learn of this; they end when "
                "the timeout of their process group is over."
            )

    def gather(self, value: Any) -> list[Any]:
        """What every rank brings, in their order; to be called right after `meet`."""
        found: list[Any] = [None] * self.ranks
        try:
            # In a trace, calls of torch go by Python and hold its lock: gloo would wait for it, to
            # free the tensors of the last exchange, and this thread for gloo.
            with no_python_dispatcher():
                dist.all_gather_object(found, value, group=self._group)
        except RuntimeError as error:
            self._is_lost = True
            raise ExchangeFailed(
                f"another rank failed while the ranks agreed on a plan: {first_line(error)}. Look "
                "at the first error of the other ranks; nothing was updated in this step"
            ) from error
        return found

    def _compare(
        self,
        key: str,
        timeout: datetime.timedelta | None,
        wait: datetime.timedelta | None = None,
        values: str = "",
    ) -> tuple[bool, bool]:
        """Whether some rank has another key, and whether all have the same values.

        The largest and the least of all codes are equal if nobody has another.
        """
        options = AllreduceOptions()
        options.reduceOp = dist.ReduceOp(dist.ReduceOp.MAX)
        if timeout is not None:
            options.timeout = timeout
        with no_python_dispatcher():
            codes = torch.tensor([_code(key), -_code(key), _code(values), -_code(values)])
            work = self._group.allreduce([codes], options)
            work.wait(*(() if wait is None else (wait,)))
            most, least, most_values, least_values = codes.tolist()
        return most != -least, most_values == -least_values

    def _raise_apart(self, told: str) -> NoReturn:
        each = self._what_each_does(told)
        failed = [text for text in each if f": {_FAILED}: " in text]
        if failed:
            raise RanksApart(
                f"{'; '.join(failed)}. So no rank goes on, and nothing was exchanged at this "
                "point; correct that error, or let every rank leave the same batch out"
            )
        way_on = LEFT_APART if any(AFTER_EXCHANGE in text for text in each) else SAME_BATCHES
        raise RanksApart(
            "the ranks are about to do different things and would wait for each other for ever: "
            f"{'; '.join(each)}. {way_on}"
        )

    def _what_each_does(self, told: str) -> list[str]:
        text = told.encode()[:_TOLD_BYTES]
        options = AllgatherOptions()
        options.timeout = TELLING
        try:
            with no_python_dispatcher():
                own = torch.zeros(_TOLD_BYTES, dtype=torch.uint8)
                own[: len(text)] = torch.frombuffer(bytearray(text), dtype=torch.uint8)
                found = [torch.empty_like(own) for _ in range(self.ranks)]
                self._group.allgather([found], [own], options).wait()
                texts = [
                    bytes(item.tolist()).rstrip(b"\0").decode(errors="ignore") for item in found
                ]
        except RuntimeError:
            self._is_lost = True
            return [f"rank {self.rank}: {told}", "another rank ended before it said what it does"]
        return [f"rank {rank}: {text}" for rank, text in enumerate(texts)]


def _code(text: str) -> int:
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:7], "big")


def meeting_of(ranks: tuple[int, ...]) -> Meeting:
    """The meeting of these ranks of the default group; only they have to ask for it."""
    try:
        return _meeting(dist.group.WORLD, ranks)
    except CotrainError:
        raise
    except RuntimeError as error:
        raise ExchangeFailed(
            f"another rank failed before it compiled its step: {first_line(error)}. Look at the "
            "first error of the other ranks"
        ) from error


@functools.lru_cache(8)
def _meeting(world: Any, ranks: tuple[int, ...]) -> Meeting:
    """Of the group `world`; another one has other groups."""
    is_world = len(ranks) == dist.get_world_size()
    group = dist.new_group(
        list(ranks),
        backend="gloo",
        timeout=min(LONGEST, timeout_of(world)),
        use_local_synchronization=not is_world,
    )
    return Meeting(group)


def timeout_of(group: Any) -> datetime.timedelta:
    """After what time a collective of `group` gives up."""
    found = []
    for device in getattr(group, "_device_types", ()):
        options = getattr(group._get_backend(device), "options", None)
        found.append(getattr(options, "_timeout", LONGEST))
    return min(found, default=LONGEST)


def first_line(error: BaseException) -> str:
    """What an error of a process group says, without where in its sources."""
    text = (str(error).strip().splitlines() or [type(error).__name__])[0]
    told = text.partition("] ")[2] if text.startswith("[/") else text
    return told.partition(". This is typically")[0].rstrip(".")

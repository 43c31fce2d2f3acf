"""Bucketed step: the base program, with everything at home on the device, cut in buckets.

In: a Problem and about how many buckets. Out: `BucketedStep`, which says for every slot in which
bucket it is. Bucket 0 is a head without ops, the last one the epilogue. Any graph can be cut: a cut
is made where the fewest bytes of short-lived values cross, which in a transformer is between two
blocks, in a U-Net between two levels, in a recurrent net between two time steps.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

from cotrain_compile.dataflow import PERSISTENT_ROLES, Buffer, Dataflow, Role
from cotrain_compile.placement.policies import resident
from cotrain_compile.placement.problem import Problem
from cotrain_compile.placement.residency import DeviceProgram, IntervalSum, low_precision_copies
from cotrain_compile.placement.schedule.find_moves import moves_of
from cotrain_compile.placement.schedule.moves import Moves
from cotrain_compile.plan import Placement

# Values alive for less than this part of the step do not cross a good cut.
BRIEF = 0.05


@dataclass(frozen=True)
class BucketedStep:
    """The buckets with ops begin in slots `starts`; `at_peaks` says how they were found.

    `moves` are those of the base placement: its program has no update in it.
    """

    problem: Problem
    moves: Moves
    starts: Sequence[int]
    at_peaks: bool

    @property
    def dataflow(self) -> Dataflow:
        return self.problem.dataflow

    @property
    def program(self) -> DeviceProgram:
        return self.moves.program

    @property
    def ends(self) -> Sequence[int]:
        """The slot after each bucket with ops."""
        return [*self.starts[1:], self.program.end]

    @property
    def epilogue(self) -> int:
        """Index of the last bucket."""
        return len(self.starts) + 1

    @cached_property
    def low_precision_copies(self) -> dict[str, str]:
        """The low-precision copy of each parameter that is used in no other way."""
        return low_precision_copies(self.dataflow)

    @cached_property
    def frozen(self) -> list[Buffer]:
        """Parameters that the step uses and does not write."""
        updated, program = self.dataflow.update, self.program
        return [
            b
            for b in self.dataflow.buffers
            if b.role is Role.PARAM
            and b.name not in updated
            and program.touches.get(b.name)
            and program.last_write(b.name) < 0
        ]

    @cached_property
    def over_from(self) -> int:
        """The first slot from which the device has nothing left to do in any plan, nor to wait for.

        An op that takes no time may still wait, for an exchange or for what comes over the link.
        """
        slot, elapsed_s = self.program.end, self.moves.elapsed_s
        while slot and elapsed_s[slot - 1] == elapsed_s[slot] and not self._may_wait(slot - 1):
            slot -= 1
        return slot

    def _may_wait(self, slot: int) -> bool:
        """Whether the op there awaits an exchange, or something that comes over the link."""
        op = self.program.ops[slot]
        return bool(op.awaits) or any(self._may_come(n, slot) for n in (*op.reads, *op.writes))

    def _may_come(self, name: str, slot: int) -> bool:
        """Whether a buffer may come for the op there: it has a home, or was touched long before."""
        buffer, touches = self.dataflow.buffer[name], self.program.touches[name]
        made = touches[0] == slot and not buffer.is_input
        moves = buffer.is_passing or buffer.role in PERSISTENT_ROLES
        return moves and not made and slot - 1 not in touches

    def bucket(self, slot: int) -> int:
        """The bucket of a slot: the head before the first op, the epilogue after the last."""
        return self.epilogue if slot >= self.program.end else bisect_right(self.starts, slot)

    def bucket_before(self, slot: int) -> int:
        """The last bucket in which a copy may run that ends before the op there.

        Cut at peaks, that is the one before where its own bucket begins with the op.
        """
        return self.bucket(slot - self.at_peaks)

    def apart(self, leaves: int, returns: int) -> bool:
        """Whether memory is checked between two buckets while what leaves the one is offloaded."""
        return leaves + (0 if self.at_peaks else 1) < returns

    def undecided_bytes(self, without: Iterable[str] = ()) -> list[int]:
        """Bytes in each slot of what no cluster of weights holds, nor is in `without`."""
        updates = self.dataflow.updates
        left_out = {name for group in updates for name in (group.param, *group.states)}
        left_out |= {g.gradient for g in updates if self.dataflow.buffer[g.gradient].is_passing}
        left_out |= {buffer.name for buffer in self.frozen}
        kept = self.dataflow.kept_gradients
        left_out |= {gradient for param in left_out for gradient in kept.get(param, ())}
        left_out.update(without)
        curve = IntervalSum(self.program.end + 1)
        for held in self.moves.instances:
            if held.buffer.name not in left_out:
                curve.add(held.buffer.nbytes, held.first, held.last)
        return curve.values()


def bucketed(problem: Problem, buckets: int | None, *, at_peaks: bool) -> BucketedStep:
    """The step of `problem` in about `buckets` buckets; None: each op is one.

    Cuts are where few bytes cross, or, with `at_peaks`, right before the ops with most alive.
    """
    base = resident(problem.dataflow)
    bare = Placement(
        "choices",
        base.homes,
        base.updates,
        early_updates=True,
        recomputed=problem.recomputed,
        recomputed_apart=problem.apart,
        splits=problem.splits,
    )
    moves = moves_of(problem, bare)
    seconds = [b - a for a, b in pairwise(moves.elapsed_s)]
    starts: Sequence[int]
    if buckets is None:
        starts = range(max(1, len(seconds)))
    elif at_peaks:
        starts = peak_points(seconds, moves.slot_bytes, buckets)
    else:
        starts = cut_points(seconds, _crossing_bytes(moves), buckets)
    return BucketedStep(problem, moves, starts, at_peaks)


def _crossing_bytes(moves: Moves) -> list[int]:
    """Bytes of short-lived values alive between two slots: those that no cluster holds."""
    end, elapsed_s = moves.program.end, moves.elapsed_s
    curve = IntervalSum(end + 1)
    for held in moves.instances:
        alive_s = elapsed_s[min(held.last, end)] - elapsed_s[held.first]
        brief = alive_s < BRIEF * elapsed_s[-1]
        if held.buffer.role is Role.TEMPORARY and brief and held.first + 1 < held.last:
            curve.add(held.buffer.nbytes, held.first + 1, held.last)
    return curve.values()


def cut_points(seconds: Sequence[float], crossing_bytes: Sequence[int], count: int) -> list[int]:
    """First slots of about `count` buckets, the first being 0.

    `crossing_bytes[k]` are alive between slots k - 1 and k. Every bucket takes at least half of an
    equal share of the time, and its end is the cheapest cut before it would take twice that; an op
    that alone takes longer is a bucket of its own.
    """
    if not seconds:
        return [0]
    share_s = sum(seconds) / max(1, count)
    cuts, start = [0], 0
    while True:
        end = _next_cut(seconds, crossing_bytes, start, share_s)
        if end >= len(seconds) or sum(seconds[end:]) < 0.5 * share_s:
            return cuts
        cuts.append(end)
        start = end


def peak_points(seconds: Sequence[float], alive_bytes: Sequence[int], count: int) -> list[int]:
    """First slots of about `count` buckets, each but the first beginning where most is alive.

    The time is divided into equal windows, and each is cut at the op with the most bytes alive.
    """
    window_s = sum(seconds) / max(1, count)
    peaks: dict[int, int] = {}
    elapsed_s = 0.0
    for slot, taken_s in enumerate(seconds):
        window = int(elapsed_s / window_s) if window_s else 0
        if window not in peaks or alive_bytes[slot] > alive_bytes[peaks[window]]:
            peaks[window] = slot
        elapsed_s += taken_s
    return sorted({0, *peaks.values()})


def _next_cut(
    seconds: Sequence[float], crossing_bytes: Sequence[int], start: int, share_s: float
) -> int:
    """The cheapest cut after `start`, len(seconds) when the rest is one bucket."""
    taken_s, best = 0.0, 0
    for slot in range(start, len(seconds)):
        taken_s += seconds[slot]
        if taken_s < 0.5 * share_s:
            continue
        if best and taken_s > 1.5 * share_s:
            return best
        if not best or crossing_bytes[slot + 1] < crossing_bytes[best]:
            best = slot + 1
    return best if best and best < len(seconds) else len(seconds)

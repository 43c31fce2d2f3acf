"""Pipeline works: what stages compute, send on, bring to their hosts and update in a step.

In: a `Draft`, a cut with the seconds of its stages. Out: `Work`s in the order of their lanes, and
seconds that this order takes at least, before any is made. No torch.

A stage runs its micro-batches in the order of GPipe (all forwards, then all backwards) or of 1F1B
(as many forwards as stages follow, then a backward and a forward in turn). What goes from stage to
stage is sent while they compute. Where what a stage keeps is away, it goes to the host behind its
forward, which the next forward but one waits for, and comes back behind the turn before the last,
so that no more than `stage_away.HELD` micro-batches are on the device. Each stage updates at its
end, on the device what rests there, and on the host, layer by layer, what rests there.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from cotrain_compile.cluster.stage_away import StageAway
from cotrain_compile.cluster.stages import PipelineOrder, Stages
from cotrain_compile.placement.simulate.engine import Work

# A bound is a sum in another order than the simulator's.
_ROUNDING = 1 - 1e-9


@dataclass(frozen=True)
class HostWork:
    """The update of a layer on the host: its gradients down, the update, its parameters up."""

    layer: str
    down_s: float
    update_s: float
    up_s: float
    down_bytes: int
    up_bytes: int


@dataclass(frozen=True)
class Swapped:
    """What of a stage goes to the host and back: what it keeps of each micro-batch, updates."""

    kept_bytes: float = 0.0
    down_s: float = 0.0
    up_s: float = 0.0
    updates: tuple[HostWork, ...] = ()

    @property
    def updates_s(self) -> float:
        """What the updates take at least, behind the last backward."""
        sums = (
            sum(each.down_s for each in self.updates),
            sum(each.update_s for each in self.updates),
            sum(each.up_s for each in self.updates),
        )
        return max(sums)


@dataclass(frozen=True)
class Draft:
    """A cut that fits; seconds of its stages, over hops and to hosts are for one micro-batch."""

    order: PipelineOrder
    stages: Stages
    each: int
    micro_batches: int
    recompute: bool
    forward_s: tuple[float, ...]
    backward_s: tuple[float, ...]
    update_s: tuple[float, ...]
    hop_s: tuple[float, ...]
    away: tuple[StageAway, ...]
    swapped: tuple[Swapped, ...]
    host_bytes: int

    @cached_property
    def bound_s(self) -> float:
        """What this order takes at least: the longest of two chains through each stage.

        Before its first forward a micro-batch passes the stages before it, and they run its
        backward after its last one; each stage updates at its end. Between, a stage computes all
        micro-batches; or it waits for one to come back, as often as it may begin another only then.
        """
        both_s = [sum(both) for both in zip(self.forward_s, self.backward_s, strict=True)]
        around_s = [2 * hop_s for hop_s in self.hop_s]
        updates_s = [
            max(own_s, swapped.updates_s)
            for own_s, swapped in zip(self.update_s, self.swapped, strict=True)
        ]
        passed_s, longest_s = 0.0, 0.0
        back_s = sum(both_s) + sum(around_s)
        for stage, each_s in enumerate(both_s):
            ahead = self.order.in_flight(self.micro_batches, len(both_s), stage)
            rounds, more = divmod(self.micro_batches - 1, ahead)
            waiting_s = (rounds + 1) * back_s + more * self.backward_s[stage]
            ends_s = max(updates_s[stage], updates_s[0] if stage else 0.0)
            stays_s = max(self.micro_batches * each_s, waiting_s)
            longest_s = max(longest_s, passed_s + stays_s + ends_s)
            if stage < len(around_s):
                passed_s += each_s + around_s[stage]
                back_s -= each_s + around_s[stage]
        return longest_s * _ROUNDING

    @property
    def swapped_bytes(self) -> tuple[int, int]:
        """What all stages send to their hosts, and what comes back."""
        down = up = 0.0
        for swapped in self.swapped:
            kept = self.micro_batches * swapped.kept_bytes
            down += kept + sum(each.down_bytes for each in swapped.updates)
            up += kept + sum(each.up_bytes for each in swapped.updates)
        return round(down), round(up)


def works_of(draft: Draft) -> Iterator[Work]:
    """All works of a step, stage by stage."""
    stages = len(draft.forward_s)
    for stage in range(stages):
        turns = list(_turns(draft.order, draft.micro_batches, stages - stage))
        forwards = 0  # among the turns before the one before
        for place, turn in enumerate(turns):
            if place >= 2:
                forwards += turns[place - 2].kind == "forward"
            if turn.kind == "forward":
                yield from _forward(draft, stage, turn)
            else:
                before = turns[place - 2].at(stage) if place >= 2 else ""
                yield from _backward(draft, stage, turn, before, forwards)
        yield from _updates(draft, stage, turns[-1].at(stage))


class _Turn(NamedTuple):
    """A forward or backward of a micro-batch."""

    kind: str
    i: int

    def at(self, stage: int) -> str:
        """The name of its work."""
        return f"{self.kind} {self.i} of stage {stage}"


def _forward(draft: Draft, stage: int, turn: _Turn) -> Iterator[Work]:
    i, swapped = turn.i, draft.swapped[stage]
    after = [f"activations {i} over hop {stage - 1}"] if stage else []
    if swapped.kept_bytes and i >= 2:
        after.append(f"kept {i - 2} of stage {stage}")
    yield Work(turn.at(stage), f"device{stage}", draft.forward_s[stage], tuple(after))
    if stage < len(draft.hop_s):
        lane, seconds = f"activations over hop {stage}", draft.hop_s[stage]
        yield Work(f"activations {i} over hop {stage}", lane, seconds, (turn.at(stage),))
    if swapped.kept_bytes:
        lane = f"device{stage}/swap out"
        yield Work(f"kept {i} of stage {stage}", lane, swapped.down_s, (turn.at(stage),))


def _backward(draft: Draft, stage: int, turn: _Turn, before: str, forwards: int) -> Iterator[Work]:
    """`before` is the turn before the last, up to which there were so many forwards.

    What was kept comes back behind that turn, and when of these forwards all but the last are
    away: then there are that one, the turn that follows, and the one that comes.
    """
    i, swapped = turn.i, draft.swapped[stage]
    after = [_Turn("forward", i).at(stage)]
    after += [f"gradients {i} over hop {stage}"] if stage < len(draft.hop_s) else []
    if swapped.kept_bytes:
        waits = [f"kept {i} of stage {stage}"]
        waits += [before] if before else []
        waits += [f"kept {forwards - 2} of stage {stage}"] if forwards >= 2 else []
        after.append(f"kept {i} back to stage {stage}")
        yield Work(after[-1], f"device{stage}/swap in", swapped.up_s, tuple(waits))
    yield Work(turn.at(stage), f"device{stage}", draft.backward_s[stage], tuple(after))
    if stage:
        hop = stage - 1
        lane, seconds = f"gradients over hop {hop}", draft.hop_s[hop]
        yield Work(f"gradients {i} over hop {hop}", lane, seconds, (turn.at(stage),))


def _updates(draft: Draft, stage: int, last: str) -> Iterator[Work]:
    device = f"device{stage}"
    yield Work(f"update of stage {stage}", device, draft.update_s[stage])
    for each in draft.swapped[stage].updates:
        down, update = f"gradients of {each.layer}", f"update of {each.layer}"
        yield Work(down, f"{device}/swap out", each.down_s, (last,))
        yield Work(update, f"{device}/host", each.update_s, (down,))
        yield Work(f"weights of {each.layer}", f"{device}/swap in", each.up_s, (update,))


def _turns(order: PipelineOrder, micro_batches: int, stages: int) -> Iterator[_Turn]:
    """In which order a stage with so many stages from it on runs its micro-batches."""
    ahead = order.in_flight(micro_batches, stages, 0)
    yield from (_Turn("forward", i) for i in range(ahead))
    for i in range(micro_batches):
        yield _Turn("backward", i)
        if ahead + i < micro_batches:
            yield _Turn("forward", ahead + i)

"""Pipeline step: what stages compute, send on, bring to their hosts and update in a step.

In: `Stage`s, one on each rank, and micro-batches in an order. Out: a `StageStep`, and seconds that
this order takes at least, before any task is made. No torch.

A stage runs its micro-batches in the order of GPipe (all forwards, then all backwards) or of 1F1B
(as many forwards as stages follow, then a backward and a forward in turn). What goes from stage to
stage is sent while they compute. Where what a stage keeps is offloaded, it goes to the host behind
its forward, which the next forward but one waits for, and comes back behind the turn before the
last, so that no more than `HELD` micro-batches are on the device. The last stage may do
both passes of a micro-batch at once. Each stage updates at its end, on the device what rests there,
and on the host, layer by layer, what rests there.

Where other ranks run the same stage on other samples, its layers are gathered before its first
forward, part by part, and its gradients are exchanged behind its last backward, part by part too.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from cotrain_compile.cluster.model.profiles import Layer
from cotrain_compile.cluster.pipeline.cuts import (
    PipelineOrder,
)
from cotrain_compile.cluster.steps.stage_step import (
    ROUNDING,
    Does,
    Rank,
    Ring,
    StageStep,
    StageTask,
)


class ExchangedPart(NamedTuple):
    """Layers of a stage that are gathered at once (0 bytes: they are whole), and whose gradients
    are exchanged at once: what is done, of how many bytes, and over which ring."""

    forward_s: float
    backward_s: float
    gathered_bytes: float
    exchanges: tuple[tuple[Does, float, str], ...]


class Stage(NamedTuple):
    """Consecutive layers: seconds of a micro-batch, by the profile, and bytes.

    So many go to the next stage, and as many come back as a gradient. An update on the device
    touches `touched_bytes`. What is `kept_bytes` of a micro-batch goes to the host and comes back;
    the host updates the layers `hosted`. Its `parts` are told where other ranks have it too. Both
    passes of a micro-batch that it does `at_once` are in the place of its backward.
    """

    forward_s: float
    backward_s: float
    sent_bytes: float = 0.0
    touched_bytes: float = 0.0
    kept_bytes: float = 0.0
    hosted: Sequence[Layer] = ()
    parts: Sequence[ExchangedPart] = ()
    at_once: bool = False


@dataclass(frozen=True)
class StagesInOrder:
    """Stages, each on the rank of its number, that run so many micro-batches.

    Each rank stands for all that run its stage; these exchange over `rings`.
    """

    ranks: Sequence[Rank]
    stages: Sequence[Stage]
    order: PipelineOrder
    micro_batches: int
    rings: Mapping[str, Ring] = field(default_factory=dict)

    def least_s(self) -> float:
        """No step takes less: a stage with all its micro-batches, and the way there and back.

        A stage begins when its first micro-batch has passed those before it, which are still to be
        passed when its last one is done. Until then it is busy as long as it computes all
        micro-batches; or it waits for one to come back, as often as it may begin another only then.
        """
        each = list(zip(self.ranks, self.stages, strict=True))
        backward_s = [rank.seconds(Does.COMPUTE, stage.backward_s) for rank, stage in each]
        both_s = [
            rank.seconds(Does.COMPUTE, stage.forward_s) + own_s
            for (rank, stage), own_s in zip(each, backward_s, strict=True)
        ]
        around_s = [2 * rank.seconds(Does.SEND, stage.sent_bytes) for rank, stage in each[:-1]]
        updates_s = [_updates_s(rank, stage) for rank, stage in each]
        passed_s, longest_s = 0.0, 0.0
        back_s = sum(both_s) + sum(around_s)
        for number, own_s in enumerate(both_s):
            ahead = self.order.in_flight(self.micro_batches, len(both_s), number)
            rounds, more = divmod(self.micro_batches - 1, ahead)
            waiting_s = (rounds + 1) * back_s + more * backward_s[number]
            ends_s = max(updates_s[number], updates_s[0] if number else 0.0)
            stays_s = max(self.micro_batches * own_s, waiting_s)
            longest_s = max(longest_s, passed_s + stays_s + ends_s)
            if number < len(around_s):
                passed_s += own_s + around_s[number]
                back_s -= own_s + around_s[number]
        return longest_s * ROUNDING

    def turns_s(self) -> float:
        """Nor less than all turns in their order, with what is sent between them: what the step
        takes where it exchanges nothing, and nothing is on hosts."""
        ranks, stages = self.ranks, self.stages
        each = list(zip(ranks, stages, strict=True))
        forward_s = [rank.seconds(Does.COMPUTE, stage.forward_s) for rank, stage in each]
        backward_s = [rank.seconds(Does.COMPUTE, stage.backward_s) for rank, stage in each]
        for number, stage in enumerate(stages):
            if stage.at_once:
                backward_s[number] += forward_s[number]
                forward_s[number] = 0.0
        hops_s = [rank.seconds(Does.SEND, stage.sent_bytes) for rank, stage in each[:-1]]
        ends_s = _turns_end_s(self.order, self.micro_batches, forward_s, backward_s, hops_s)
        pairs = zip(ends_s, map(_updates_s, ranks, stages), strict=True)
        return max(end_s + update_s for end_s, update_s in pairs) * ROUNDING


def _turns_end_s(
    order: PipelineOrder,
    micro_batches: int,
    forward_s: Sequence[float],
    backward_s: Sequence[float],
    hops_s: Sequence[float],
) -> list[float]:
    """When the last turn of each stage ends. A stage that waits is looked at again when what it
    waits for has come."""
    last = len(forward_s) - 1
    turns = [list(_turns(order, micro_batches, last + 1 - n))[::-1] for n in range(last + 1)]
    free_s, on_s, back_s = [0.0] * (last + 1), [0.0] * last, [0.0] * last
    came: list[dict[_Turn, float]] = [{} for _ in turns]
    ready = list(range(last, -1, -1))
    while ready:
        n = ready.pop()
        here, now_s = came[n], free_s[n]
        while turns[n]:
            turn = turns[n][-1]
            is_forward = turn.kind == "forward"
            if n != (0 if is_forward else last):
                if turn not in here:
                    break
                now_s = max(now_s, here.pop(turn))
            turns[n].pop()
            now_s += forward_s[n] if is_forward else backward_s[n]
            if is_forward and n < last:
                on_s[n] = came[n + 1][turn] = max(on_s[n], now_s) + hops_s[n]
                ready.append(n + 1)
            elif not is_forward and n:
                back_s[n - 1] = came[n - 1][turn] = max(back_s[n - 1], now_s) + hops_s[n - 1]
                ready.append(n - 1)
        free_s[n] = now_s
    return free_s


def _updates_s(rank: Rank, stage: Stage) -> float:
    """What the updates take at least, behind the last backward: on the device or beside it."""
    return max(
        rank.seconds(Does.UPDATE, stage.touched_bytes),
        sum(rank.seconds(Does.STORE, layer.grad_bytes) for layer in stage.hosted),
        sum(rank.seconds(Does.HOST_UPDATE, layer.touched_bytes) for layer in stage.hosted),
        sum(rank.seconds(Does.FETCH, layer.param_bytes) for layer in stage.hosted),
    )


def pipeline_step(stages: StagesInOrder) -> StageStep:
    """All tasks of a step, stage by stage."""
    numbers = range(len(stages.stages))
    return StageStep(
        tuple(stages.ranks),
        tuple(task for number in numbers for task in _tasks(stages, number)),
        rings=stages.rings,
    )


class _Turn(NamedTuple):
    """A forward or backward of a micro-batch."""

    kind: str
    i: int

    def at(self, stage: int) -> str:
        """The name of its task."""
        return f"{self.kind} {self.i} of stage {stage}"


def _tasks(of: StagesInOrder, number: int) -> Iterator[StageTask]:
    turns = list(_turns(of.order, of.micro_batches, len(of.stages) - number))
    forwards = 0  # among the turns before the one before
    for place, turn in enumerate(turns):
        before = turns[place - 2] if place >= 2 else None
        forwards += before is not None and before.kind == "forward"
        if turn.kind == "forward":
            yield from _forward(of, number, turn)
        else:
            yield from _backward(of, number, turn, before, forwards)
    yield from _updates(of.stages[number], number, turns[-1].at(number))


def _forward(of: StagesInOrder, number: int, turn: _Turn) -> Iterator[StageTask]:
    stage, i, name = of.stages[number], turn.i, turn.at(number)
    after = [f"activations {i} over hop {number - 1}"] if number else []
    if stage.kept_bytes and i >= 2:
        after.append(f"kept {i - 2} of stage {number}")
    if stage.at_once:
        yield StageTask(name, Does.COMPUTE, 0.0, after, number)
    else:
        yield from _passed_on(of, number, i, name, after)
    if number < len(of.stages) - 1:
        yield _hop(of, f"activations {i}", number, name)
    if stage.kept_bytes:
        kept = f"kept {i} of stage {number}"
        yield StageTask(kept, Does.STORE, stage.kept_bytes, [name], number)


def _backward(
    of: StagesInOrder, number: int, turn: _Turn, before: _Turn | None, forwards: int
) -> Iterator[StageTask]:
    """`before` is the turn before the last, up to which there were so many forwards.

    What was kept comes back behind that turn, and when of these forwards all but the last are
    stored: then there are that one, the turn that follows, and the one that comes.
    """
    stage, i = of.stages[number], turn.i
    after = [_Turn("forward", i).at(number)]
    after += [f"gradients {i} over hop {number}"] if number < len(of.stages) - 1 else []
    if stage.kept_bytes:
        waits = [f"kept {i} of stage {number}"]
        waits += [before.at(number)] if before else []
        waits += [f"kept {forwards - 2} of stage {number}"] if forwards >= 2 else []
        after.append(f"kept {i} back to stage {number}")
        yield StageTask(after[-1], Does.FETCH, stage.kept_bytes, waits, number)
    if stage.at_once:
        made = f"{turn.at(number)}, its forward"
        yield from _passed_on(of, number, i, made, after)
        after = [made]
    yield from _passed_back(of, number, i, turn.at(number), after)
    if number:
        yield _hop(of, f"gradients {i}", number - 1, turn.at(number))


def _passed_on(
    of: StagesInOrder, number: int, i: int, name: str, after: Sequence[str]
) -> Iterator[StageTask]:
    stage = of.stages[number]
    if i == 0 and any(part.gathered_bytes for part in stage.parts):
        yield from _gathered(of, number, name, after)
    else:
        yield StageTask(name, Does.COMPUTE, stage.forward_s, after, number)


def _passed_back(
    of: StagesInOrder, number: int, i: int, name: str, after: Sequence[str]
) -> Iterator[StageTask]:
    stage = of.stages[number]
    if i == of.micro_batches - 1 and stage.parts:
        yield from _exchanged(of, number, name, after)
    else:
        yield StageTask(name, Does.COMPUTE, stage.backward_s, after, number)


def _gathered(
    of: StagesInOrder, number: int, name: str, after: Sequence[str]
) -> Iterator[StageTask]:
    """The first forward of a stage, each part of it when its parameters are there."""
    parts = of.stages[number].parts
    lane = _lane(of, "shard", number)
    for k, part in enumerate(parts):
        gather = f"gather of part {k} of stage {number}"
        yield StageTask(gather, Does.GATHER, part.gathered_bytes, (), None, lane, "shard")
        made = name if k == len(parts) - 1 else f"{name}, part {k}"
        yield StageTask(made, Does.COMPUTE, part.forward_s, [*after, gather], number)
        after = ()


def _exchanged(
    of: StagesInOrder, number: int, name: str, after: Sequence[str]
) -> Iterator[StageTask]:
    """The last backward of a stage, and behind each part of it what becomes of its gradients."""
    parts = of.stages[number].parts
    for k, part in reversed(list(enumerate(parts))):
        before = name if k == 0 else f"{name}, part {k}"
        yield StageTask(before, Does.COMPUTE, part.backward_s, after, number)
        after = ()
        named = zip(_names(part, k, number), part.exchanges, strict=True)
        for exchange, (does, nbytes, over) in named:
            lane = _lane(of, over, number)
            yield StageTask(exchange, does, nbytes, [before], None, lane, over)
            before = exchange


def _names(part: ExchangedPart, k: int, number: int) -> list[str]:
    """Of the exchanges of a part."""
    return [f"{does} over {over} of part {k}, stage {number}" for does, _, over in part.exchanges]


def _lane(of: StagesInOrder, over: str, number: int) -> str:
    """Each stage has rings of its own."""
    return f"{of.rings[over].lane} of stage {number}"


def _hop(of: StagesInOrder, what: str, hop: int, made: str) -> StageTask:
    lane = f"{what.partition(' ')[0]} over hop {hop}"
    name = f"{what} over hop {hop}"
    return StageTask(name, Does.SEND, of.stages[hop].sent_bytes, [made], hop, lane)


def _updates(stage: Stage, number: int, last: str) -> Iterator[StageTask]:
    summed = [names[-1] for k, part in enumerate(stage.parts) if (names := _names(part, k, number))]
    touched = stage.touched_bytes
    yield StageTask(f"update of stage {number}", Does.UPDATE, touched, summed, number)
    for layer in stage.hosted:
        down, update = f"gradients of {layer.name}", f"update of {layer.name}"
        yield StageTask(down, Does.STORE, layer.grad_bytes, [last, *summed], number)
        yield StageTask(update, Does.HOST_UPDATE, layer.touched_bytes, [down], number)
        yield StageTask(f"weights of {layer.name}", Does.FETCH, layer.param_bytes, [update], number)


def _turns(order: PipelineOrder, micro_batches: int, stages: int) -> Iterator[_Turn]:
    """In which order a stage with so many stages from it on runs its micro-batches."""
    ahead = order.in_flight(micro_batches, stages, 0)
    yield from (_Turn("forward", i) for i in range(ahead))
    for i in range(micro_batches):
        yield _Turn("backward", i)
        if ahead + i < micro_batches:
            yield _Turn("forward", ahead + i)

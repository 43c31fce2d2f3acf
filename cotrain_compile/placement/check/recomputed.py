"""Recomputed: may the values that a placement names be made again, and do they come out as before?

In: the Dataflow of the step and a Placement. Out: nothing, or `PlanError` with the name that is
wrong. Asked of the step itself, as if run: each op that runs again must find what it read the first
time, and must change nothing but what it makes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping

from cotrain_compile.dataflow import Buffer, Dataflow, Op, Phase, Role
from cotrain_compile.errors import PlanError
from cotrain_compile.plan import Placement

_TRAINING_NORMS = (
    "aten._native_batch_norm_legit_functional.default",
    "aten._batch_norm_with_update_functional.default",
)

# Its product may be made by a mask that was drawn before; its last two results are these.
_DROPOUT = "aten.native_dropout.default"


def check_recomputed(dataflow: Dataflow, placement: Placement) -> None:
    """Raise `PlanError` unless all of `placement.recomputed` can be made again."""
    names = placement.recomputed
    apart = frozenset(placement.recomputed_apart)
    unknown = sorted(apart.difference(names))
    _require(not unknown, f"lacks {unknown[:3]}, which placement.recomputed_apart names")
    if not names:
        return
    _require(len(set(names)) == len(names), "names a buffer twice")
    offloaded = set(placement.offloaded)
    for name in names:
        _require(name in dataflow.buffer, f"names {name}, which the step has not")
        _check_buffer(dataflow.buffer[name])
        _require(name not in offloaded, f"names {name}, as placement.offloaded does")
    maker = _makers(dataflow, frozenset(names))
    for name in names:
        _require(name in maker, f"names {name}, which no op of the forward makes")
    moving = _moving_averages(dataflow, names)
    versions: dict[str, int] = {}
    found: dict[str, dict[str, int]] = {}  # by op, which version of each buffer it read
    again: set[str] = set()
    for op in dataflow.ops:
        if op.phase is not Phase.FORWARD:
            for name in op.reads:
                _run_again(name, maker, versions, found, again, apart)
        # What a dropout draws it draws once.
        drawn = op.writes if op.target == _DROPOUT else ()
        reads = (n for n in op.reads if n not in drawn)
        fixed = (n for n in reads if not _is_order(dataflow, n) and (op.name, n) not in moving)
        found[op.name] = {n: versions.get(n, 0) for n in fixed}
        for name in op.writes:
            versions[name] = versions.get(name, 0) + 1


def _check_buffer(buffer: Buffer) -> None:
    own = not (buffer.is_input or buffer.is_output) and buffer.role is Role.TEMPORARY
    _require(own, f"names {buffer.name}, which is no value of the step's own")


def _makers(dataflow: Dataflow, names: frozenset[str]) -> Mapping[str, Op]:
    """The op of the forward that makes each of `names`; raises where it may not run twice."""
    maker: dict[str, Op] = {}
    buffers = dataflow.buffer
    for op in dataflow.ops:
        for name in names.intersection(op.writes) if not _awaits_gather(dataflow, op) else ():
            _require(name not in maker, f"names {name}, which is written twice")
            _require(op.phase is Phase.FORWARD, f"names {name}, which the forward does not make")
            maker[name] = op
    writing = (op for op in dataflow.ops if not _awaits_gather(dataflow, op))
    writers = Counter(name for op in writing for name in op.writes)
    for op in maker.values():
        known = op.target.startswith(("aten.", "prims.")) or _is_gather(op)
        _require(known, f"has {op.name} run again, an op of which nobody knows what else it does")
        if op.target == _DROPOUT and op.writes[-1] not in names:
            _check_mask(dataflow, op, writers)
            continue
        for name in (name for name in op.writes if not _is_order(dataflow, name)):
            own = writers[name] == 1 and not buffers[name].is_input and name not in op.reads
            _require(own, f"has {op.name} run again, which writes into {name}")
    return maker


def _check_mask(dataflow: Dataflow, dropout: Op, writers: Mapping[str, int]) -> None:
    """Of a dropout the product is made again: its mask stays as it is, and neither is an input."""
    for name in dropout.writes[-2:]:
        own = writers[name] == 1 and not dataflow.buffer[name].is_input
        _require(own, f"has {dropout.name} run again, whose {name} is not its own")
    mask, later = dropout.writes[-1], (op for op in dataflow.ops if op.phase is not Phase.FORWARD)
    kept = any(mask in op.reads for op in later)
    _require(kept, f"has {dropout.name} run again, whose mask {mask} is not kept")


def _moving_averages(dataflow: Dataflow, names: Collection[str]) -> set[tuple[str, str]]:
    """Each batch norm in training with each of the two averages that it moves on.

    Nothing but the next averages, its last two results, depends on them: these are not made again.
    """
    norms = (op for op in dataflow.ops if op.target in _TRAINING_NORMS)
    averages = {name: op.name for op in norms for name in op.writes[-2:]}
    found = set()
    for op in dataflow.ops:
        for name in averages.keys() & set(op.reads) if op.target == "aten.copy_.default" else ():
            _require(name not in names, f"names {name}, the next average of {averages[name]}")
            norm = dataflow.ops[dataflow.position[averages[name]]]
            found |= {(norm.name, into) for into in op.writes if into in norm.reads}
    return found


def _is_gather(op: Op) -> bool:
    """Whether `op` begins a gather that all ranks run again, as they have one plan."""
    exchange = op.collective
    return exchange is not None and exchange.again and exchange.kind.startswith("all_gather_into")


def _awaits_gather(dataflow: Dataflow, op: Op) -> bool:
    return bool(op.awaits) and _is_gather(dataflow.ops[dataflow.position[op.awaits]])


def _is_order(dataflow: Dataflow, name: str) -> bool:
    """Whether `name` is the order of a process group; what runs again has a place of its own."""
    return dataflow.buffer[name].role is Role.GROUP


def _run_again(
    name: str,
    maker: Mapping[str, Op],
    versions: Mapping[str, int],
    found: Mapping[str, Mapping[str, int]],
    again: set[str],
    apart: frozenset[str],
) -> None:
    """Whatever runs again for a read of `name` reads what it did the first time.

    What runs for a value that is made `apart` has not run for anybody else.
    """
    waiting = [(name, again)]
    while waiting:
        name, ran = waiting.pop()
        op = maker.get(name)
        if op is None or op.name in again or op.name in ran:
            continue
        _require(op.name in found, f"has {op.name} run again before it has run")
        ran.add(op.name)
        if not apart.isdisjoint(op.writes):
            ran = set()
        for read, version in found[op.name].items():
            same = versions.get(read, 0) == version
            _require(same, f"has {op.name} run again after {read}, which it reads, was overwritten")
            waiting.append((read, ran))


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise PlanError(f"unsound plan: placement.recomputed {message}")

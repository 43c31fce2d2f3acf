"""Recomputable: which forward values may be made again, and which gathers may run again.

In: a Dataflow. Out: names of buffers, each made by one op that gives the same whenever it runs.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace

from cotrain_compile.dataflow import Buffer, Dataflow, Op, Phase, Role

# Ops of torch that are no functions of their arguments, or that decide: the smallest difference,
# as of code compiled otherwise, would make the backward take another branch than the forward.
_NEVER = (
    "aten.copy_",
    "aten.set_",
    "aten._local_scalar_dense",
    "aten.empty",
    "aten.new_empty",
    "aten._assert",
    "aten.topk",
    "aten.sort",
    "aten.argsort",
    "aten.argmax",
    "aten.argmin",
    "aten.max.dim",
    "aten.min.dim",
    "aten.max_pool2d_with_indices",
    "aten.max_pool3d_with_indices",
    "aten.adaptive_max_pool2d",
    "aten.adaptive_max_pool3d",
    "aten.fractional_max_pool2d",
    "aten.fractional_max_pool3d",
    "aten.kthvalue",
    "aten.median",
    "aten.mode",
    "aten.nonzero",
    "aten.unique",
    "aten._unique",
    "aten.searchsorted",
    "aten.bucketize",
    "aten.cummax",
    "aten.cummin",
    "aten.round",
    "aten.floor",
    "aten.ceil",
    "aten.trunc",
    "aten.sign",
)

# A dropout runs again as a product with the mask that it has drawn, by the op of its backward: that
# mask is kept for the backward in any case. Its results are the product and the mask.
DROPOUT, BY_MASK = "aten.native_dropout.default", "aten.native_dropout_backward.default"

# Batch norms in training: the last two results are the next running statistics, and the only ones
# that depend on those before.
_NORMS = ("aten._native_batch_norm_legit_functional.", "aten._batch_norm_with_update_functional.")


def recomputable(dataflow: Dataflow) -> frozenset[str]:
    """The buffers that may be made again: forward temporaries, each made by one pure op of torch.

    An op is not run again that draws random numbers, writes into an input, takes a discrete
    decision, talks to other devices, reads a value on the host, or is none of torch's own, as
    nobody knows what else it does; nor one that reads what is written before the last op that
    could need it again. The low-precision copy of a parameter is the parameter's, and no temporary.
    A batch norm runs again, and the running statistics that it then makes are nobody's. Of a
    dropout the product is made again, by its mask.
    """
    writers: dict[str, int] = {}
    for op in dataflow.ops:
        for name in op.writes:
            writers[name] = writers.get(name, 0) + 1
    latest = _latest_needs(dataflow)
    written = _written_at(dataflow)
    taken = {group.low_precision for group in dataflow.updates}
    taken |= {name for group in dataflow.updates for name in (group.gradient, *group.scalars)}
    running = _running_statistics(dataflow)
    later = {n for op in dataflow.ops if op.phase is not Phase.FORWARD for n in op.reads}
    found: set[str] = set()
    for position, op in enumerate(map(as_again, dataflow.ops)):
        made = [dataflow.buffer[name] for name in op.writes]
        if op.target == BY_MASK and op.phase is Phase.FORWARD and op.reads[-1] not in later:
            continue  # nobody keeps the mask
        if not made or not _is_pure(op) or not all(_is_own(b, op, writers) for b in made):
            continue
        until = max(latest.get(b.name, -1) for b in made)
        moving = running.get(op.name, {})
        reads = (name for name in op.reads if name not in moving.values())
        stay = (position < at <= until for name in reads for at in written.get(name, ()))
        if until >= 0 and not any(stay):
            found |= {
                b.name
                for b in made
                if b.role is Role.TEMPORARY
                and not b.is_output
                and b.name not in taken
                and b.name not in moving
            }
    return frozenset(found)


def as_again(op: Op) -> Op:
    """`op` as it runs again: of a dropout the product with the mask."""
    if op.target != DROPOUT:
        return op
    product, mask = op.writes[-2:]
    reads = tuple(name for name in op.reads if name not in op.writes)  # all but the generator
    return replace(op, target=BY_MASK, reads=(*reads, mask), writes=(product,))


def _running_statistics(dataflow: Dataflow) -> Mapping[str, Mapping[str, str]]:
    """Of each batch norm in training, the results that are written into statistics it has read."""
    norms = {name: op for op in dataflow.ops if op.target.startswith(_NORMS) for name in op.writes}
    found: dict[str, dict[str, str]] = {}
    for op in dataflow.ops:
        if op.target.startswith("aten.copy_") and len(op.writes) == 1:
            (into,) = op.writes
            for name in op.reads:
                norm = norms.get(name)
                if norm is not None and name in norm.writes[-2:] and into in norm.reads:
                    found.setdefault(norm.name, {})[name] = into
    return found


def gathers(dataflow: Dataflow) -> Mapping[str, Op]:
    """Of each gather of a parameter that may run again, the op that awaits it, by its name.

    It reads nothing but the part that this rank has, which nothing writes before the last op that
    could need the whole again.
    """
    waits = {op.awaits: op for op in dataflow.ops if op.awaits}
    latest, written = _latest_needs(dataflow), _written_at(dataflow)
    found = {}
    for position, op in enumerate(dataflow.ops):
        if not may_gather_again(op) or op.name not in waits:
            continue
        (made,) = without_order(dataflow, op.writes)
        stays = [at for read in without_order(dataflow, op.reads) for at in written.get(read, ())]
        until = latest.get(made, -1)
        if until >= 0 and not any(position < at <= until for at in stays):
            found[op.name] = waits[op.name]
    return found


def may_gather_again(op: Op) -> bool:
    """Whether `op` begins a gather in the forward, of which all ranks do the same."""
    kind = op.collective.kind if op.collective is not None and op.collective.again else ""
    return kind == "all_gather_into_tensor" and op.phase is Phase.FORWARD


def without_order(dataflow: Dataflow, names: Iterable[str]) -> list[str]:
    """`names` without the order of a process group, which an exchange reads and writes."""
    return [name for name in names if dataflow.buffer[name].role is not Role.GROUP]


def _is_pure(op: Op) -> bool:
    own = op.target.startswith(("aten.", "prims."))
    return op.phase is Phase.FORWARD and own and op.cost_is_known and not _is_excluded(op.target)


def _is_excluded(target: str) -> bool:
    return any(target == never or target.startswith((never + ".", never + "_")) for never in _NEVER)


def _is_own(buffer: Buffer, op: Op, writers: Mapping[str, int]) -> bool:
    """Whether `op` alone makes `buffer`, from nothing of it."""
    return not buffer.is_input and writers[buffer.name] == 1 and buffer.name not in op.reads


def _latest_needs(dataflow: Dataflow) -> dict[str, int]:
    """By buffer, the last position at which its maker may have to run again, whatever else does.

    That is where an op outside the forward first reads it, or anything that the forward made of it.
    """
    first: dict[str, int] = {}
    for position, op in enumerate(dataflow.ops):
        if op.phase is not Phase.FORWARD:
            for name in op.reads:
                first.setdefault(name, position)
    latest = dict(first)
    for op in reversed(dataflow.ops):
        if op.phase is Phase.FORWARD and op.writes:
            needed = max(latest.get(name, -1) for name in op.writes)
            for name in op.reads:
                if needed > latest.get(name, -1):
                    latest[name] = needed
    return latest


def _written_at(dataflow: Dataflow) -> dict[str, list[int]]:
    found: dict[str, list[int]] = {}
    for position, op in enumerate(dataflow.ops):
        for name in op.writes:
            found.setdefault(name, []).append(position)
    return found

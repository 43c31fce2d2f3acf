"""Split: a step and the device of each op in, the part of each device and their messages out.

Pure function of a Dataflow. A buffer that one device makes and another reads crosses once to each
reader, after its last writer; the reader's part has an op that receives it. What the step finds (a
batch, a setting) each device has by itself as long as nobody writes it. What outlives the step and
is written belongs to one device.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import replace

from cotrain_compile.dataflow import Buffer, Dataflow, Op, Role
from cotrain_compile.errors import PlanError
from cotrain_compile.machine import Machine
from cotrain_compile.placement.joint import RECEIVE, JointProblem, Message


def formulate_jointly(
    dataflow: Dataflow, machine: Machine, budgets: Mapping[str, int], device_of: Mapping[str, str]
) -> JointProblem:
    """The problem of `dataflow` with each op on the device that `device_of` names.

    Raises `PlanError` where an op has no device or a space no budget, where an update is spread
    over devices, and where a tensor would be written in two places.
    """
    missing = [op.name for op in dataflow.ops if op.name not in device_of]
    _require(not missing, f"no device is named for {', '.join(missing[:3])}; name one for each op")
    strange = set(device_of.values()) - {p.space for p in machine.processors.values()}
    _require(not strange, f"{sorted(strange)} are no devices of {machine.name}")
    unlimited = machine.spaces.keys() - budgets.keys()
    _require(not unlimited, f"{sorted(unlimited)} of {machine.name} have no budget; give one each")
    messages = _messages(dataflow, device_of)
    devices = dict.fromkeys(device_of[op.name] for op in dataflow.ops)
    parts = {device: _part(dataflow, device_of, device, messages) for device in devices}
    return JointProblem(dataflow, machine, dict(budgets), dict(device_of), parts, messages)


def _messages(dataflow: Dataflow, device_of: Mapping[str, str]) -> tuple[Message, ...]:
    """In the order in which they can begin."""
    writers: dict[str, list[Op]] = {}
    readers: dict[str, dict[str, Op]] = {}  # the first on each device
    for op in dataflow.ops:
        for name in op.writes:
            writers.setdefault(name, []).append(op)
        for name in op.reads:
            readers.setdefault(name, {}).setdefault(device_of[op.name], op)
    found = []
    for name, wrote in writers.items():
        made_on = dict.fromkeys(device_of[op.name] for op in wrote)
        _require(
            len(made_on) == 1,
            f"{name} is written on {' and '.join(made_on)}; put what writes it on one device",
        )
        (source,) = made_on
        for target, first in readers.get(name, {}).items():
            if target != source:
                found.append(_message(dataflow, name, wrote[-1], first, source, target))
    return tuple(sorted(found, key=lambda m: dataflow.position[m.after]))


def _message(
    dataflow: Dataflow, name: str, last: Op, first: Op, source: str, target: str
) -> Message:
    buffer, position = dataflow.buffer[name], dataflow.position
    _require(
        not buffer.is_input and position[last.name] < position[first.name],
        f"{first.name} reads {name} on {target} while {last.name} writes it on {source}; put both "
        "on one device",
    )
    # A name with a dot is none of a graph's, and with the target none of another device's.
    received = f"receive.{name}.{target}"
    return Message(name, buffer.nbytes, source, target, last.name, received, first.name)


def _part(
    dataflow: Dataflow, device_of: Mapping[str, str], device: str, messages: tuple[Message, ...]
) -> Dataflow:
    """The ops of `device`, what they touch, and what receives for them."""
    received = [message for message in messages if message.target == device]
    own = {op.name for op in dataflow.ops if device_of[op.name] == device}
    ops = tuple(_with_receiving(dataflow, own, received))
    touched = {name for op in ops for name in (*op.reads, *op.writes)}
    updates = []
    for group in dataflow.updates:
        here = own.intersection(group.ops)
        if here:
            _require(
                len(here) == len(group.ops),
                f"the update of {group.param} is spread over devices; put its ops on one",
            )
            updates.append(group)
            touched |= {group.param, group.gradient, *group.states, *group.scalars}
            touched |= {group.low_precision} - {""}
    sent = {message.buffer for message in messages if message.source == device}
    arrived = {message.buffer for message in received}
    buffers = [
        _as_in_part(buffer, is_sent=buffer.name in sent, has_arrived=buffer.name in arrived)
        for buffer in dataflow.buffers
        if buffer.name in touched
    ]
    return Dataflow(
        fingerprint=f"{dataflow.fingerprint} on {device}",
        ops=ops,
        buffers=(*buffers, *map(_sender_side, received)),
        updates=tuple(updates),
        notes=dataflow.notes,
    )


def _with_receiving(dataflow: Dataflow, own: Set[str], received: Sequence[Message]) -> Iterator[Op]:
    """The `own` ops, and right before the first that needs a message, the op that receives it."""
    for op in dataflow.ops:
        if op.name in own:
            for message in received:
                if message.needed_by == op.name:
                    reads = (_sender_side(message).name,)
                    yield Op(message.before, RECEIVE, op.phase, reads, (message.buffer,))
            yield op


def _sender_side(message: Message) -> Buffer:
    """What a receiving op reads: nothing, but the host and the step do not know it."""
    return Buffer(f"{message.before}.from", 0, Role.BATCH, is_input=True)


def _as_in_part(buffer: Buffer, *, is_sent: bool, has_arrived: bool) -> Buffer:
    if has_arrived:
        return replace(buffer, is_output=False)
    return replace(buffer, is_output=True) if is_sent else buffer


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise PlanError(message)

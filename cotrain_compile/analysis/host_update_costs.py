"""Host update costs: seconds of a parameter's update on the host, by what runs it.

In: an update group and a machine. A fused loop passes over memory once, at the measured rate, which
is that of float32: it computes in that whatever it reads, so a narrow element takes as long.
Captured ops go one after the other: each element that an op reads or writes takes its time, whether
it has two bytes or four. Ops on whole tensors go through memory as well, and large results are made
in fresh memory, which waits for the system's pages.
"""

from __future__ import annotations

from cotrain_compile.dataflow import Dataflow, Op, UpdateGroup
from cotrain_compile.machine import Machine

# The C library keeps memory of results up to this size to be used again, and gives back the rest.
KEPT_BYTES = 32 << 20
# A single number. What else is not as large as the parameter keeps ops from going in parts.
_SINGLE_BYTES = 8
# Of an element as wide as the parameter's, of a narrower and of a wider one.
_WIDTHS = (0.25, 0.5, 1.0, 2.0, 4.0)

_BYTES_OF = {"bfloat16": 2, "float16": 2, "float64": 8, "int64": 8, "bool": 1}


def host_update_s(
    dataflow: Dataflow, group: UpdateGroup, machine: Machine, *, captured: bool = False
) -> float:
    """Seconds of an update of `group`; `captured` where no loop may take the place of its ops."""
    rates, launch_s = machine.host_update, machine.host.launch_s
    loop_s = _widening(dataflow, group) * update_bytes(dataflow, group) / rates.bytes_per_s
    if group.has_loop and not captured:
        return launch_s + loop_s
    ops = [dataflow.ops[dataflow.position[name]] for name in group.ops]
    ops_s = sum(_elements(op) for op in ops) * rates.seconds_per_element
    if captured or not _goes_in_parts(dataflow, group, ops):
        ops_s += sum(op.bytes_moved for op in ops) / rates.bytes_per_s
        ops_s += _fresh_bytes(dataflow, group, ops) * rates.seconds_per_fresh_byte
    return launch_s + max(loop_s, ops_s)


def update_bytes(dataflow: Dataflow, group: UpdateGroup) -> int:
    """Bytes that a fused update of `group` reads plus those it writes.

    A buffer that is read and written counts twice; temporaries between the group's ops stay in
    registers and do not count. Plain float32 AdamW: gradient 1, parameter and two states 2 each,
    7 times the parameter's bytes.
    """
    ops = [dataflow.ops[dataflow.position[name]] for name in group.ops]
    touched_by_group = {*_owned(group), group.gradient, *group.scalars}
    read = {name for op in ops for name in op.reads} & touched_by_group
    written = {name for op in ops for name in op.writes} & touched_by_group
    return sum(dataflow.buffer[name].nbytes for names in (read, written) for name in names)


def _widening(dataflow: Dataflow, group: UpdateGroup) -> float:
    """How many times as many bytes the parameter would have in float32; at least 1."""
    ops = (dataflow.ops[dataflow.position[name]] for name in group.ops)
    widths = [_BYTES_OF.get(op.dtype, 4) for op in ops if group.param in op.writes]
    return max(1.0, 4 / min(widths, default=4))


def _owned(group: UpdateGroup) -> set[str]:
    return {group.param, group.low_precision, *group.states}


def _elements(op: Op) -> float:
    """Elements that an op reads plus those it writes."""
    return op.bytes_moved / _BYTES_OF.get(op.dtype, 4)


def _goes_in_parts(dataflow: Dataflow, group: UpdateGroup, ops: list[Op]) -> bool:
    """Whether all that the ops touch has an element for each of the parameter's, or is a number.

    As `runtime.captured_kernels` finds it in the ops themselves; here only sizes are known.
    """
    param_bytes = dataflow.buffer[group.param].nbytes
    sizes = {dataflow.buffer[name].nbytes for op in ops for name in (*op.reads, *op.writes)}
    alike = {param_bytes * width for width in _WIDTHS}
    element_by_element = all(op.flops <= op.bytes_moved for op in ops)
    return element_by_element and all(size <= _SINGLE_BYTES or size in alike for size in sizes)


def _fresh_bytes(dataflow: Dataflow, group: UpdateGroup, ops: list[Op]) -> int:
    """Bytes of the results that the system has to find memory for, each time anew."""
    made = {name for op in ops for name in op.writes} - _owned(group)
    return sum(size for name in made if (size := dataflow.buffer[name].nbytes) >= KEPT_BYTES)

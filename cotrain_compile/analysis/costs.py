"""Costs: seconds of every op on the device and of every parameter's update on the host.

In: a `Dataflow` and a `Machine`; measured times where a profile exists. Out: a `CostTable`, whose
`source` says which of the two its numbers are. A transfer costs `Link.seconds` of its bytes.

An update on the host takes what runs it. A fused loop passes over memory once, at the measured
rate, which is that of float32: it computes in that whatever it reads, so a narrow element takes as
long. Captured ops go one after the other: each element that an op reads or writes takes its time,
whether it has two bytes or four. Ops on whole tensors go through memory as well, and large results
are made in fresh memory, which waits for the system's pages.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Literal

from cotrain_compile.analysis.fusion import Part, kernel_parts
from cotrain_compile.dataflow import Collective, Dataflow, Op, UpdateGroup
from cotrain_compile.errors import PlanError
from cotrain_compile.machine import LARGEST, Machine, Network, Tier, TierSpec
from cotrain_compile.machine.op_classes import (
    FUSED,
    IN_A_ROW,
    RELAYOUT,
    SMALL_BYTES,
    VIEW,
    OpKind,
    classes_of,
)
from cotrain_compile.plan import Lane, Plan, Timeline
from cotrain_compile.support.units import format_bytes

FORMAT_VERSION = 1


@dataclass(frozen=True)
class CostTable:
    """`device_s` by op name, `host_update_s` by parameter name.

    `source` is "roofline", "measured" when every op and update that does any work was measured,
    "mixed" when some were. `unknown` names the ops whose cost nobody knows or has measured: their
    seconds are those of their bytes, the least that they can take. `network_s` has what exchanges
    take beside the device, by the op that begins one.
    """

    device_s: Mapping[str, float]
    host_update_s: Mapping[str, float]
    source: Literal["roofline", "measured", "mixed"] = "roofline"
    unknown: tuple[str, ...] = ()
    network_s: Mapping[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        tables = (self.device_s, self.host_update_s, self.network_s)
        for name, seconds in (item for table in tables for item in table.items()):
            if not 0 <= seconds <= LARGEST:
                raise ValueError(f"{name} takes {seconds} s; seconds go from 0 to 1e30")

    def seconds(self, name: str, tier: Tier) -> float:
        """Of the op `name` on the device, or of the update of the parameter `name` on the host."""
        return self.device_s[name] if tier is Tier.DEVICE else self.host_update_s[name]


def roofline(
    dataflow: Dataflow, machine: Machine, *, captured: bool = False, compiled: bool | None = None
) -> CostTable:
    """What the machine's rates allow: max(flops / flops_per_s, bytes / bytes_per_s, launch_s).

    Views and other ops that neither compute nor move anything cost nothing. A host update reads and
    writes each of its group's buffers once, however many ops the step writes it with: it runs as
    one fused loop, limited by the host's memory (Williams et al., CACM 2009). Where there is no
    loop, or all run as `captured`, its ops run one by one (`host_update_costs`). An update is a
    loop as well on a device that `fuses_updates`, whatever its optimizer; its ops share the time by
    the bytes they move. An op takes as many times its roofline as the device has as a factor for
    its class; where it has one of fused code and runs `compiled` code, None where one that
    `fuses_updates` does, what is limited by memory moves the bytes of its kernel (`kernels`). Where
    code is not compiled and the device has starts, an op takes its start and then its roofline.
    """
    network_s = _network_s(dataflow, machine)
    parts = kernel_parts(dataflow) if fuses(machine, compiled) else {}
    device = machine.device
    if device.starts_s and not _runs_code(machine, compiled):
        in_rows = _in_rows(dataflow)
        device_s = {op.name: _waited_s(op, device, op.name in in_rows) for op in dataflow.ops}
    else:
        device_s = {op.name: _op_s(op, device, parts.get(op.name)) for op in dataflow.ops}
    device_s |= dict.fromkeys(network_s, machine.device.launch_s)
    if machine.fuses_updates:
        for group in dataflow.updates:
            device_s |= _as_one_loop(dataflow, group, machine.device)
    return CostTable(
        device_s=device_s,
        host_update_s={
            group.param: host_update_s(dataflow, group, machine, captured=captured)
            for group in dataflow.updates
        },
        unknown=tuple(
            op.name for op in dataflow.ops if not op.cost_is_known and op.name not in network_s
        ),
        network_s=network_s,
    )


def fuses(machine: Machine, compiled: bool | None) -> bool:
    """Whether memory-bound ops are taken as kernels: of `compiled` code, as `roofline` has it."""
    return _runs_code(machine, compiled) and FUSED in machine.device.factors


def _runs_code(machine: Machine, compiled: bool | None) -> bool:
    return machine.fuses_updates if compiled is None else compiled


def _network_s(dataflow: Dataflow, machine: Machine) -> dict[str, float]:
    """Seconds of each exchange on the network; nothing where nobody knows the network."""
    network = machine.network
    exchanges = {op.name: op.collective for op in dataflow.ops if op.collective is not None}
    if network is None:
        return {}
    return {name: exchange_s(exchange, network) for name, exchange in exchanges.items()}


def exchange_s(exchange: Collective, network: Network) -> float:
    """Seconds of an exchange, as a ring of the ranks does it."""
    ring_s = exchange.rounds * network.latency_s + exchange.wire_bytes / network.bytes_per_s
    return ring_s * (network.scatter if exchange.kind.startswith("reduce_scatter") else 1.0)


def with_measured(
    costs: CostTable,
    *,
    device_s: Mapping[str, float] | None = None,
    host_update_s: Mapping[str, float] | None = None,
) -> CostTable:
    """`costs` with measured seconds in place of computed ones, for the names that have them.

    Raises:
        PlanError: a measured name is not in `costs`, so the profile is of another step.
    """
    device_s, host_update_s = device_s or {}, host_update_s or {}
    for measured, known, what in (
        (device_s, costs.device_s, "op"),
        (host_update_s, costs.host_update_s, "update of parameter"),
    ):
        for name in measured:
            if name not in known:
                raise PlanError(
                    f"the profile has a time for {what} {name}, which this step does not have; "
                    "measure this step, or leave the profile out"
                )
    if not device_s and not host_update_s:
        return costs
    everything = _covers(device_s, costs.device_s) and _covers(host_update_s, costs.host_update_s)
    return CostTable(
        device_s={**costs.device_s, **device_s},
        host_update_s={**costs.host_update_s, **host_update_s},
        source="measured" if everything else "mixed",
        unknown=tuple(name for name in costs.unknown if name not in device_s),
        network_s=costs.network_s,
    )


def unknown_words(ops: Sequence[Op]) -> str:
    """How many ops have an unknown cost, what they are, and the bytes that they move."""
    kinds = list(dict.fromkeys(op.target for op in ops))
    more = f" and {len(kinds) - 3} more" if len(kinds) > 3 else ""
    moved = format_bytes(sum(op.bytes_moved for op in ops))
    return f"{len(ops)} ops of unknown cost ({', '.join(kinds[:3])}{more}) move {moved}"


def measured_costs(timelines: Sequence[Timeline], plan: Plan) -> CostTable:
    """What the ops and host updates of measured steps took: the median over `timelines` of `plan`.

    The profile of a step: `formulate` prefers it to the roofline, and `save`d it can be passed as
    the option `profile`. The medians of a lane are scaled so that they add up to its median step:
    on a busy machine some op is slow in every step, and a different one each time. Where steps
    overlap, a step has the end of one update and the beginning of the next: together a whole one.
    """
    # What confirms guesses has mostly nothing to do, so that it does not say what an update takes.
    param_of = {r.name: r.param for r in plan.host_updates if not r.confirms}
    updates = [_update_s(timeline, param_of) for timeline in timelines]
    ops = [
        {span.name: span.end_s - span.start_s for span in timeline.lane(Lane.DEVICE)}
        for timeline in timelines
    ]
    return CostTable(_typical_step(ops), _typical_step(updates), source="measured")


def _update_s(timeline: Timeline, param_of: Mapping[str, str]) -> dict[str, float]:
    """Seconds of each host update, by parameter; `param_of` has it by the name of the task."""
    seconds: dict[str, float] = {}
    for span in timeline.lane(Lane.HOST):
        param = param_of.get(span.name)
        if param is not None:
            seconds[param] = seconds.get(param, 0.0) + span.end_s - span.start_s
    return seconds


def _typical_step(steps: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Seconds by name: the median over `steps`, scaled to add up to the median of their totals."""
    names = dict.fromkeys(name for step in steps for name in step)
    medians = {name: median(step[name] for step in steps if name in step) for name in names}
    total_s = sum(medians.values())
    scale = median(sum(step.values()) for step in steps) / total_s if total_s else 1.0
    return {name: scale * seconds for name, seconds in medians.items()}


# What a kernel of compiled code takes before all of the memory's rate is used, and after: most
# kernels of a network of images move no more than ten times as much.
_START_S = 2e-6


def _op_s(op: Op, tier: TierSpec, part: Part | None = None) -> float:
    """Seconds of an op by itself, or as a part of a kernel."""
    if op.flops == 0 and op.bytes_moved == 0:
        return 0.0
    if part is not None:
        fused_s = tier.factors.get(FUSED, 1.0) * part.nbytes / tier.bytes_per_s
        return max(fused_s + _START_S * part.begins, tier.launch_s * part.begins)
    return max(_at_rates_s(op, tier), tier.launch_s)


def _waited_s(op: Op, tier: TierSpec, in_a_row: bool) -> float:
    """Seconds of an op on a processor that waits for each: it begins when the one before ends."""
    if op.flops == 0 and op.bytes_moved == 0:
        return tier.starts_s.get(VIEW, 0.0)
    classes = (IN_A_ROW,) if in_a_row else _classes(op)
    return _first(tier.starts_s, classes, tier.launch_s) + _at_rates_s(op, tier)


def _at_rates_s(op: Op, tier: TierSpec) -> float:
    bytes_s = op.bytes_moved / tier.bytes_per_s
    roofline_s = max(op.flops / tier.flops_per_s_of(op.dtype), bytes_s)
    seconds = _first(tier.factors, _classes(op), 1.0) * roofline_s
    if (op.kind or _unsaid(op)) is OpKind.CONVOLUTION and op.dtype != "float32":
        seconds += tier.factors.get(RELAYOUT, 0.0) * bytes_s
    return seconds


def _classes(op: Op) -> Sequence[str]:
    return classes_of(op.kind or _unsaid(op), op.target, op.dtype, computes=op.flops > 0)


def _first(constants: Mapping[str, float], names: Sequence[str], otherwise: float) -> float:
    return next((constants[name] for name in names if name in constants), otherwise)


def _in_rows(dataflow: Dataflow) -> frozenset[str]:
    """The ops of small updates, which the eager lowering runs in lock step (`lock_step`)."""
    small = (
        group.ops
        for group in dataflow.updates
        if all(
            dataflow.buffer[name].nbytes <= SMALL_BYTES
            for op in group.ops
            for name in dataflow.ops[dataflow.position[op]].writes
        )
    )
    return frozenset(name for names in small for name in names)


def _unsaid(op: Op) -> OpKind:
    """The kind of an op that does not say it: by its flops, and the name of what it calls."""
    if not op.flops:
        return OpKind.OTHER
    if "attention" in op.target:
        return OpKind.ATTENTION_BACKWARD if "backward" in op.target else OpKind.ATTENTION
    return OpKind.CONVOLUTION if "conv" in op.target else OpKind.PRODUCT


def _as_one_loop(dataflow: Dataflow, group: UpdateGroup, tier: TierSpec) -> dict[str, float]:
    """Seconds by op of an update in one loop; empty where it multiplies matrices, as Muon's does.

    Whatever goes element by element has at most a flop for each byte it moves.
    """
    ops = [dataflow.ops[dataflow.position[name]] for name in group.ops]
    moved = sum(op.bytes_moved for op in ops)
    if not moved or any(op.flops > op.bytes_moved for op in ops):
        return {}
    loop_s = max(update_bytes(dataflow, group) / tier.bytes_per_s, tier.launch_s)
    return {op.name: loop_s * op.bytes_moved / moved for op in ops}


def _covers(measured: Mapping[str, float], known: Mapping[str, float]) -> bool:
    """Whether every name that takes any time was measured."""
    return all(name in measured for name, seconds in known.items() if seconds > 0)


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

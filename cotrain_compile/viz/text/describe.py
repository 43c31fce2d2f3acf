"""Describe: a saved machine, step or timeline in words, and how a plan and a step differ."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Set
from dataclasses import replace

from cotrain_compile.analysis.costs import unknown_words
from cotrain_compile.analysis.liveness import liveness
from cotrain_compile.dataflow import PERSISTENT_ROLES, Dataflow, Phase
from cotrain_compile.machine import HostUpdate, Link, Machine, Processor, TierSpec
from cotrain_compile.placement.placed import as_placed
from cotrain_compile.placement.split import split_regions
from cotrain_compile.plan import HostRegion, Lane, Plan, Timeline
from cotrain_compile.support.units import format_bytes, format_rate, format_seconds


def describe_machine(machine: Machine) -> str:
    """Tiers, links and host updates with their rates, and where the figures come from."""
    if not machine.has_one_device:
        return "\n".join(_parts_of(machine))
    update = machine.host_update
    return "\n".join(
        [
            f"machine      {machine.name}",
            f"device       {_tier(machine.device)}",
            f"host         {_tier(machine.host)}",
            f"host update  {format_rate(update.bytes_per_s)} on {update.workers} worker(s), "
            f"{update.slowdown_while_copying:.2f} times slower while copying",
            f"op by op     {_op_by_op(update)}",
            f"device to host  {_link(machine.d2h)}",
            f"host to device  {_link(machine.h2d)}",
            f"both ways    {machine.duplex:.2f} times one way",
            f"rates        {machine.rates.value}",
            f"source       {machine.source or 'not given'}",
        ]
    )


def _parts_of(machine: Machine) -> Iterator[str]:
    """A machine with any spaces, processors and links, a line for each."""
    yield f"machine      {machine.name}"
    for name, space in machine.spaces.items():
        yield f"space        {name}: {format_bytes(space.capacity_bytes)}"
    for name, processor in machine.processors.items():
        yield f"processor    {name} in {processor.space}: {_rates(processor)}"
    for name, link in machine.links.items():
        yield f"link         {name} from {link.source} to {link.target}: {_link(link)}"
    for path in machine.shared_paths:
        yield f"shared       {', '.join(path.links)}: {path.together:.2f} times one of them"
    yield f"source       {machine.source or 'not given'}"


def _op_by_op(update: HostUpdate) -> str:
    """What an update costs that no fused loop takes."""
    how = "" if update.elements_per_s and update.fresh_bytes_per_s else " (assumed)"
    return (
        f"{1e-9 / update.seconds_per_element:.2f} G elements/s, large results at "
        f"{format_rate(1 / update.seconds_per_fresh_byte)}{how}"
    )


def describe_step(dataflow: Dataflow) -> str:
    """Ops and flops by phase, bytes by role, and the peak with everything on the device."""
    lines = [f"step         {dataflow.fingerprint}: {len(dataflow.ops)} ops"]
    for phase in Phase:
        ops = [op for op in dataflow.ops if op.phase is phase]
        flops = sum(op.flops for op in ops)
        lines.append(f"{phase.value:12} {len(ops)} ops, {flops / 1e9:.1f} Gflop")
    sizes: Counter[str] = Counter()
    for buffer in dataflow.buffers:
        sizes[buffer.role.value.replace("_", " ")] += buffer.nbytes
    lines.append("bytes        " + ", ".join(f"{r} {format_bytes(n)}" for r, n in sizes.items()))
    lines.append("             (temporary: summed over the step, they are not alive all at once)")
    alive = liveness(dataflow)
    if dataflow.ops:
        op = dataflow.ops[alive.peak_op]
        where = op.target + (f" in {op.module}" if op.module else "")
        lines.append(
            f"peak         {format_bytes(alive.peak_bytes)} if all is on the device, {where}"
        )
    if dataflow.ranks > 1:
        wire = sum(op.collective.wire_bytes for op in dataflow.ops if op.collective)
        count = sum(op.collective is not None for op in dataflow.ops)
        sent = f"{count} exchanges, in which each sends {format_bytes(int(wire))}"
        lines.append(f"ranks        one of {dataflow.ranks}: {sent}")
    captured = sum(not group.has_loop for group in dataflow.updates)
    told = f", {captured} of them without a fused loop" if captured else ""
    updates = len(dataflow.updates)
    lines.append(f"updates      {updates} parameters can be updated on the host{told}")
    if unknown := [op for op in dataflow.ops if not op.cost_is_known]:
        lines.append(f"unknown      {unknown_words(unknown)}; a profile has their times")
    lines += [f"note         {note}" for note in dataflow.notes]
    return "\n".join(lines)


def describe_timeline(timeline: Timeline) -> str:
    """Length of the step, how busy each lane is, and the peak of each tier."""
    lines = [f"{timeline.source:12} {format_seconds(timeline.makespan_s)} a step"]
    for lane in Lane:
        if lane is Lane.NETWORK and not timeline.lane(lane):
            continue
        lines.append(
            f"{lane.value:12} {len(timeline.lane(lane))} spans, "
            f"{format_seconds(timeline.busy_s(lane))} busy"
        )
    lines += [
        f"{tier.value} peak  {format_bytes(nbytes)}" for tier, nbytes in timeline.peak_bytes.items()
    ]
    return "\n".join(lines)


def describe_differences(plan: Plan, dataflow: Dataflow) -> list[str]:
    """What `plan` names otherwise than `dataflow` does, one entry a kind, the clearest kind first.

    Empty when all that can be compared agrees: parameters, persistent tensors, sizes of what is
    moved, ops. Shapes and arguments cannot be: they are in the fingerprint alone.
    """
    placement = plan.placement
    known = {region.name for region in dataflow.regions}
    if known.issuperset(placement.splits):
        dataflow = split_regions(dataflow, placement.splits)
        placement = replace(placement, splits={})
    lost = set(placement.recomputed) - dataflow.buffer.keys()
    if not lost:
        dataflow = as_placed(dataflow, placement)
    persistent = {b.name for b in dataflow.buffers if b.role in PERSISTENT_ROLES}
    moved = {transfer.buffer: transfer.nbytes for transfer in plan.transfers}
    resized = {
        f"{name} ({nbytes:,} bytes in the plan, {dataflow.buffer[name].nbytes:,} here)"
        for name, nbytes in moved.items()
        if name in dataflow.buffer and dataflow.buffer[name].nbytes != nbytes
    }
    kinds = (
        ("parameters that only the plan updates", placement.updates.keys() - dataflow.update),
        ("parameters that only this step updates", dataflow.update.keys() - placement.updates),
        ("tensors that only the plan keeps", placement.homes.keys() - persistent),
        ("tensors that only this step keeps", persistent - placement.homes.keys()),
        ("other sizes", resized),
        (
            "buffers that only the plan has",
            (_buffers_named_by(plan) - dataflow.buffer.keys()) | lost,
        ),
        ("ops that only the plan has", set(_ops_named_by(plan)) - dataflow.position.keys()),
    )
    return [f"{kind}: {_some(names)}" for kind, names in kinds if names]


def _buffers_named_by(plan: Plan) -> set[str]:
    made = {region.makes for region in plan.host_regions if region.makes}
    updated = {region.param for region in plan.host_regions}
    return (
        {*(transfer.buffer for transfer in plan.transfers), *plan.placement.offloaded}
        | made
        | updated
    )


def _ops_named_by(plan: Plan) -> Iterator[str]:
    for task in plan.tasks:
        yield from (op for op in (task.issue_after, task.wait_before) if op is not None)
        if isinstance(task, HostRegion):
            yield from task.ops
    for entry in plan.moved:
        yield from (*entry.ops, *([entry.after] if entry.after is not None else []))


def _some(names: Set[str]) -> str:
    shown = sorted(names)[:2]
    more = len(names) - len(shown)
    return ", ".join(shown) + (f" and {more} more" if more else "")


def _tier(tier: TierSpec) -> str:
    return f"{format_bytes(tier.capacity_bytes)}, {_rates(tier)}"


def _rates(of: TierSpec | Processor) -> str:
    rates = ", ".join(f"{dtype} {rate / 1e12:.3g}" for dtype, rate in of.flops_per_s.items())
    return f"{format_rate(of.bytes_per_s)}, Tflop/s: {rates}"


def _link(link: Link) -> str:
    return f"{format_rate(link.bytes_per_s)}, {format_seconds(link.latency_s)} to start a copy"

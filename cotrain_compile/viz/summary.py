"""Summary: a plan in a few lines of words."""

from __future__ import annotations

from collections import Counter

from cotrain_compile.machine import Tier
from cotrain_compile.plan import Plan
from cotrain_compile.units import format_bytes, format_seconds


def summary(plan: Plan) -> str:
    """Policy, homes, update modes, memory against budgets, traffic and predicted time."""
    placement = plan.placement
    modes = Counter(mode.value for mode in placement.updates.values())
    homes = Counter(tier.value for tier in placement.homes.values())
    lines = [
        f"policy      {placement.policy} on {plan.machine}",
        "updates     " + ", ".join(f"{count} {mode}" for mode, count in modes.items()),
        "homes       " + ", ".join(f"{count} tensors on {tier}" for tier, count in homes.items()),
    ]
    lines += [f"{'':11} {note}" for note in plan.notes]
    for tier in Tier:
        # What the host holds depends on how fast its lanes are; on the device it does not.
        most = "at most " if tier is Tier.HOST else ""
        peak, budget = plan.predicted.peak_bytes[tier], plan.budgets[tier]
        lines.append(f"{tier.value:11} peak {most}{format_bytes(peak)} of {format_bytes(budget)}")
    down, up = plan.bytes_moved("offload"), plan.bytes_moved("prefetch")
    lines += [
        f"traffic     {format_bytes(down)} down, {format_bytes(up)} up each step",
        f"predicted   {format_seconds(plan.predicted.makespan_s)} a step",
    ]
    return "\n".join(lines)

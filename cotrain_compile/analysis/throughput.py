"""Throughput: how many tokens a step trains on per second, and how much of the device that uses.

In: a step, the machine it runs on, what it takes and how many tokens it has. The flops are those of
the step as captured: what a plan makes again is not counted twice.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

from cotrain_compile.dataflow import Dataflow
from cotrain_compile.machine import Machine
from cotrain_compile.support.units import format_seconds


@dataclass(frozen=True)
class Throughput:
    """`mfu` is the model flops utilisation: the share of the step that its flops would take at the
    machine's rate for their dtype, from 0 to 1 (PaLM, Chowdhery et al., 2022, appendix B).

    It is None where it would be above 1: the rates are then not those of the machine. `why_no_mfu`
    says so.
    """

    tokens_per_s: float
    flops_per_s: float
    mfu: float | None
    why_no_mfu: str = ""


def throughput(dataflow: Dataflow, machine: Machine, step_s: float, tokens: float) -> Throughput:
    """Of a step that takes `step_s` for `tokens` tokens.

    Raises ValueError where there are none, or the step takes no time.
    """
    if not tokens > 0 or not step_s > 0:
        raise ValueError(f"{tokens} tokens in {step_s} s: both must be above 0")
    rates = machine.device
    computing_s = sum(op.flops / rates.flops_per_s_of(op.dtype) for op in dataflow.ops)
    flops = sum(op.flops for op in dataflow.ops)
    if computing_s > step_s:
        why = _too_slow(dataflow, machine, computing_s, step_s)
        return Throughput(tokens / step_s, flops / step_s, None, why)
    return Throughput(tokens / step_s, flops / step_s, computing_s / step_s)


def _too_slow(dataflow: Dataflow, machine: Machine, computing_s: float, step_s: float) -> str:
    """Why there is no MFU: a machine that is said to compute more slowly than it did."""
    rates = machine.device
    seconds: defaultdict[str, float] = defaultdict(float)
    for op in dataflow.ops:
        seconds[op.dtype] += op.flops / rates.flops_per_s_of(op.dtype)
    dtype = max(seconds, key=seconds.__getitem__)
    lent = "" if dtype in rates.flops_per_s else ", which is that of another dtype"
    return (
        f"no MFU: at the rates of {machine.name} ({rates.flops_per_s_of(dtype) / 1e9:.3g} Gflop/s "
        f"in {dtype}{lent}) the step's flops alone take {format_seconds(computing_s)}, the step "
        f"{format_seconds(step_s)}; measure them while nothing else runs, with `cotrain-compile "
        "calibrate`, and give its machine.json as machine"
    )

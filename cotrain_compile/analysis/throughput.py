"""Throughput: how many tokens a step trains on per second, and how much of the device that uses.

In: a step, the machine it runs on, what it takes and how many tokens it has. The flops are those of
the step as captured: what a plan makes again is not counted twice.
"""

from __future__ import annotations

from dataclasses import dataclass

from cotrain_compile.dataflow import Dataflow
from cotrain_compile.machine import Machine


@dataclass(frozen=True)
class Throughput:
    """`mfu` is the model flops utilisation: the share of the step that its flops would take at the
    machine's rate for their dtype, from 0 to 1 (PaLM, Chowdhery et al., 2022, appendix B).
    """

    tokens_per_s: float
    flops_per_s: float
    mfu: float


def throughput(dataflow: Dataflow, machine: Machine, step_s: float, tokens: float) -> Throughput:
    """Of a step that takes `step_s` for `tokens` tokens.

    Raises ValueError where there are none, or the step takes no time.
    """
    if not tokens > 0 or not step_s > 0:
        raise ValueError(f"{tokens} tokens in {step_s} s: both must be above 0")
    rates = machine.device
    computing_s = sum(op.flops / rates.flops_per_s_of(op.dtype) for op in dataflow.ops)
    flops = sum(op.flops for op in dataflow.ops)
    return Throughput(tokens / step_s, flops / step_s, computing_s / step_s)

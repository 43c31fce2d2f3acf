"""Spent: where the seconds of a step go, found by leaving out what may cost them.

In: a `StageStep`. Out: seconds by what they are for, which together are those of the step: what it
takes less if exchanges took no time, what less if hosts took none either, and of what is left what
the device computes that computes longest; behind that it waits for other ranks. No torch.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

from cotrain_compile.cluster.steps.stage_step import EXCHANGES, Does, StageStep

COMPUTING, EXCHANGING, ON_HOSTS, WAITING = "computing", "exchanges", "hosts", "other ranks"
_EXCHANGES = frozenset({Does.SEND, *EXCHANGES})
_OF_HOSTS = frozenset({Does.FETCH, Does.STORE, Does.ADD, Does.HOST_UPDATE})


def spent_s(step: StageStep, exchanging: float = 0.0) -> dict[str, float]:
    """Seconds by what they are for; `exchanging` is the part of computing that is exchanges, as
    of layers that several ranks divide."""
    alone = _without(step, _EXCHANGES)
    bare = _without(alone, _OF_HOSTS)
    own_s = max(bare.lanes_s.values())
    found = {
        COMPUTING: own_s * (1 - exchanging),
        EXCHANGING: step.seconds - alone.seconds + own_s * exchanging,
        ON_HOSTS: alone.seconds - bare.seconds,
        WAITING: bare.seconds - own_s,
    }
    return {what: seconds for what, seconds in found.items() if seconds > _NOTHING * step.seconds}


# What is left of sums of the same seconds in another order.
_NOTHING = 1e-9


def _without(step: StageStep, left_out: Collection[Does]) -> StageStep:
    tasks = (task._replace(amount=0.0) if task.does in left_out else task for task in step.tasks)
    return replace(step, tasks=tuple(tasks))

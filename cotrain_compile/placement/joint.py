"""Joint: a step whose ops are spread over several devices, and a plan for each of them.

The whole step is one `Dataflow`. Each device has its part of it, which is a `Dataflow` of its own:
what another device reads of it is an output there, what it reads of another device is made by an op
that receives it. A `Message` is the copy between them. Plain data.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from cotrain_compile.dataflow import Dataflow
from cotrain_compile.machine import Machine
from cotrain_compile.plan import Plan, Timeline

FORMAT_VERSION = 1

# The target of an op that receives a message. It takes no time of its own.
RECEIVE = "cotrain.receive"


@dataclass(frozen=True)
class Message:
    """`buffer` is copied from `source` to `target`: begun after op `after`, done before `before`.

    `before` is an op of the target's part alone, which receives: it makes the buffer there, right
    before the op `needed_by`. The source keeps its copy to the end of the step.
    """

    buffer: str
    nbytes: int
    source: str
    target: str
    after: str
    before: str
    needed_by: str

    @property
    def name(self) -> str:
        return f"send.{self.buffer}.{self.target}"


@dataclass(frozen=True)
class JointProblem:
    """A step on a machine with several devices.

    `budgets` are the bytes allowed in each space, `device_of` is the space of the device that runs
    each op (its update may still be sent to the host), `parts` has the part of each device.
    """

    dataflow: Dataflow
    machine: Machine
    budgets: Mapping[str, int]
    device_of: Mapping[str, str]
    parts: Mapping[str, Dataflow]
    messages: tuple[Message, ...]


@dataclass(frozen=True)
class JointPlan:
    """A plan for each device, and what the step takes when they run beside each other.

    The plan of a device calls it "device" and its links "d2h" and "h2d"; `predicted` has the lanes
    of the machine, and before each name the device. `peak_bytes` is by space; that of the host is
    an upper bound.
    """

    plans: Mapping[str, Plan]
    predicted: Timeline
    peak_bytes: Mapping[str, int]

    @property
    def step_s(self) -> float:
        return self.predicted.makespan_s

"""Updates that make large values while they run: what fits without moves early is scheduled."""

from __future__ import annotations

import random

import pytest

from cotrain_compile.dataflow import Buffer, Dataflow, Op, Phase, Role, UpdateGroup
from cotrain_compile.errors import PlacementError
from cotrain_compile.machine import Tier
from cotrain_compile.placement.check.check import check
from cotrain_compile.placement.policies import RULES
from cotrain_compile.placement.problem import formulate
from cotrain_compile.placement.schedule.schedule import schedule
from cotrain_compile.presets import find
from tests.support.nets import MIB


def kept(name: str, nbytes: int, role: Role) -> Buffer:
    return Buffer(name, nbytes, role, is_input=True, is_output=True)


def random_step(rng: random.Random) -> Dataflow:
    """A backward with values of any lifetimes; updates whose first op makes three temporaries."""
    sizes = [MIB * rng.choice([1, 2, 4, 8, 16]) for _ in range(rng.randint(2, 3))]
    length, count = rng.randint(3, 9), len(sizes)
    gradients = [rng.randrange(length) for _ in sizes]
    values = [sorted((rng.randrange(length), rng.randrange(length))) for _ in range(4)]
    buffers = [Buffer("x", MIB, Role.BATCH, is_input=True), Buffer("h", MIB, Role.TEMPORARY)]
    buffers += [Buffer(f"z{i}", rng.randint(1, 40) * MIB, Role.TEMPORARY) for i in range(4)]
    params = tuple(f"w{i}" for i in range(count))
    ops = [Op("f", "f", Phase.FORWARD, ("x", *params), ("h",))]
    for at in range(length):
        made = [f"z{i}" for i, (begin, _) in enumerate(values) if begin == at]
        made += [f"g{i}" for i in range(count) if gradients[i] == at]
        reads = [f"z{i}" for i, (begin, end) in enumerate(values) if begin < at == end]
        buffers.append(Buffer(f"y{at}", 4, Role.TEMPORARY))
        flops = rng.choice([0, 10**9, 10**11])
        writes = (*made, f"y{at}")
        ops.append(Op(f"b{at}", "b", Phase.BACKWARD, ("h", *reads), writes, flops))
    updates = []
    for i, nbytes in enumerate(sizes):
        buffers.append(kept(f"w{i}", nbytes, Role.PARAM))
        buffers += [kept(f"{state}{i}", nbytes, Role.OPTIMIZER_STATE) for state in "mv"]
        inside = tuple(f"t{i}_{number}" for number in range(3))
        buffers += [Buffer(name, nbytes, Role.TEMPORARY) for name in (f"g{i}", *inside)]
        states, own = (f"m{i}", f"v{i}"), (f"w{i}", f"m{i}", f"v{i}")
        ops.append(Op(f"u{i}", "u", Phase.OPTIMIZER, (f"g{i}", *states), inside, 0, nbytes))
        ops.append(Op(f"v{i}_", "u", Phase.OPTIMIZER, (*inside, *own), own, 0, nbytes))
        updates.append(UpdateGroup(f"w{i}", f"g{i}", states, (), (f"u{i}", f"v{i}_")))
    return Dataflow("step", tuple(ops), tuple(buffers), tuple(updates))


SEEDS = (28, 507, *range(4))


@pytest.mark.parametrize("seed", SEEDS)
def test_what_fits_at_the_last_moment_is_scheduled(seed: int) -> None:
    """States that come early take no room for good that an update before them has to give back."""
    step = random_step(random.Random(seed))
    problem = formulate(step, find("rtx4090"), {Tier.DEVICE: 0, Tier.HOST: 1 << 40})
    placement, fits = RULES["streamed"](step), 0
    for budget in range(20, 200):
        within = problem.with_budget(Tier.DEVICE, budget * MIB)
        try:
            plan = schedule(within, placement)
        except PlacementError:
            assert not fits, "less memory was enough"
            continue
        check(within, plan)
        fits += 1
    assert fits


@pytest.mark.parametrize("rule", ["streamed", "zero-offload", "coarse"])
def test_what_reads_a_parameter_before_the_last_op_of_its_update_has_the_new_one(rule: str) -> None:
    """As a norm of what an optimizer has written, whose averages it has yet to write."""
    states = ("m", "v")
    ops = [
        Op("f", "f", Phase.FORWARD, ("x", "w"), ("h",), 10**9),
        Op("b", "b", Phase.BACKWARD, ("h",), ("g",), 10**9),
        Op("u", "u", Phase.OPTIMIZER, ("g", "w", "m"), ("w",)),
        Op("norm", "norm", Phase.OPTIMIZER, ("w",), ("n",)),
        Op("a", "u", Phase.OPTIMIZER, ("g", *states), states),
    ]
    buffers = [
        Buffer("x", MIB, Role.BATCH, is_input=True),
        *(Buffer(name, MIB, Role.TEMPORARY) for name in "hg"),
        Buffer("n", 4, Role.TEMPORARY, is_output=True),
        kept("w", MIB, Role.PARAM),
        *(kept(name, MIB, Role.OPTIMIZER_STATE) for name in states),
    ]
    update = UpdateGroup("w", "g", states, (), ("u", "a"))
    step = Dataflow("step", tuple(ops), tuple(buffers), (update,))
    problem = formulate(step, find("rtx4090"), {Tier.DEVICE: 1 << 30, Tier.HOST: 1 << 40})
    check(problem, schedule(problem, RULES[rule](step)))

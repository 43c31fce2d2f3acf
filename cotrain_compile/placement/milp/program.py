"""The integer program: which strategy for each cluster of parameters and of activations.

In: a `DecisionSpace` and budgets. Out: a linear program for `solvers`. A fluid model
(`docs/placement.md` has it in formulas): the order of ops is fixed and cut into buckets; how many
bytes of each class cross the link by the end of each bucket is a continuous variable. Two versions
are built by the same code from the same effects. The *conservative* one counts every copy one
bucket late, so that whole tensors fit where its fluids do; its solution is scheduled. The *relaxed*
one grants every copy the whole of its bucket and asks for memory only what any schedule must hold,
so that its optimum is a bound that no plan within the budgets can beat.

Milliseconds and MiB throughout: bytes and seconds ruin the numerics.
"""

from __future__ import annotations

from math import inf

from cotrain_compile.placement.decisions.decisions import DecisionSpace
from cotrain_compile.placement.milp.flows import add_flows
from cotrain_compile.placement.milp.linear import summed
from cotrain_compile.placement.milp.memory import add_device_memory, add_host_memory
from cotrain_compile.placement.milp.model import Model
from cotrain_compile.placement.milp.time import add_times
from cotrain_compile.plan import Lane

# Price of a byte on the link against time: nothing moves without a reason.
MOVING_PRICE = 2e-3


class Program:
    """The program, `linear`: conservative, or `relaxed`; with `whole` clusters, or split ones.

    By default the conservative one has whole clusters and the relaxed one, which is a bound, split
    ones. A conservative one that splits clusters of at most `large_bytes`, and no other,
    `is_rounding`: any good solution will do. One with whole clusters alone `is_whole`. With
    `cyclic`, steps overlap and `step` is the time from one to the next. With `need_mib` it
    `is_loose`: what is on the device may be beyond the budget, at the price of the time in which
    the device would wait for it to leave or to come. With every copy at the last moment it is at
    most `need_mib`. So it has a solution wherever there is a plan. Budgets are in MiB. `step` is
    the time of the step in milliseconds; `params`, `activations` and `levels` are the variables of
    the decisions, as in `Model`.
    """

    def __init__(
        self,
        space: DecisionSpace,
        budget_mib: float,
        host_budget_mib: float,
        *,
        relaxed: bool = False,
        whole: bool | None = None,
        cyclic: bool = False,
        large_bytes: float = inf,
        need_mib: float | None = None,
    ) -> None:
        whole = not relaxed if whole is None else whole
        model = Model(space, relaxed=relaxed, whole=whole, cyclic=cyclic, large_bytes=large_bytes)
        flows = add_flows(model)
        add_times(model, flows)
        beyond = add_device_memory(model, flows, budget_mib, need_mib)
        add_host_memory(model, flows, host_budget_mib)
        self.is_rounding, self.is_whole = not whole and not relaxed, whole
        self.is_loose = need_mib is not None
        self.space, self.params, self.activations = space, model.params, model.activations
        self.levels = model.levels
        self.step = summed(model.length)
        moved = summed(flow.total for lane in (Lane.D2H, Lane.H2D) for flow in flows.on(lane))
        # A bound has no price: what a plan pays for moving is not time.
        is_bound = relaxed and not whole
        price = 0.0 if is_bound else 1.0 / min(model.down_rate, model.up_rate)
        self.linear = model.linear
        self.linear.objective = self.step + price * (MOVING_PRICE * moved + beyond)

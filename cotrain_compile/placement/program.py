"""The integer program: which way for each bundle of weights, which activations leave.

In: `Choices` and budgets. Out: a pulp model for `solvers`. A fluid model (`docs/placement.md` has
it in formulas): the order of ops is fixed and cut into segments; how many bytes of each class cross
the link by the end of each segment is a continuous variable. Two versions are built by the same
code. The *careful* one counts every copy one segment late, so that whole tensors fit where its
fluids do; its solution is scheduled. The *relaxed* one grants every copy the whole of its segment
and asks for memory only what any schedule must hold, so that its optimum is a bound that no plan
within the budgets can beat.

Milliseconds and MiB throughout: bytes and seconds ruin the numerics.
"""

from __future__ import annotations

from cotrain_compile.placement.choices import Choices
from cotrain_compile.placement.linear import pulp
from cotrain_compile.placement.program_flows import add_flows
from cotrain_compile.placement.program_memory import add_device_memory, add_host_memory
from cotrain_compile.placement.program_model import Model
from cotrain_compile.placement.program_time import add_times

# Price of a byte on the link against time: nothing moves without a reason.
MOVING_PRICE = 2e-3


class Program:
    """The program as a pulp model: careful, or `relaxed`; with `whole` bundles, or split ones.

    By default the careful one has whole bundles and the relaxed one, which is a bound, split ones.
    With `cyclic`, steps overlap and `step` is the time from one to the next.
    Budgets are in MiB. `step` is the time of the step in milliseconds; `taken[b][w]` says that
    bundle b of weights is kept in way w, `away[a]` that bundle a of activations leaves.
    """

    def __init__(
        self,
        choices: Choices,
        budget_mib: float,
        host_budget_mib: float,
        *,
        relaxed: bool = False,
        whole: bool | None = None,
        cyclic: bool = False,
    ) -> None:
        whole = not relaxed if whole is None else whole
        model = Model(choices, relaxed=relaxed, whole=whole, cyclic=cyclic)
        flows = add_flows(model)
        add_times(model, flows)
        add_device_memory(model, flows, budget_mib)
        add_host_memory(model, host_budget_mib)
        self.choices, self.taken, self.away = choices, model.taken, model.away
        self.step = pulp.lpSum(model.length)
        moved = pulp.lpSum(flow.total for flow in (*flows.down, *flows.up))
        # A bound has no price: what a plan pays for moving is not time.
        is_bound = relaxed and not whole
        price = 0.0 if is_bound else MOVING_PRICE / min(model.down_rate, model.up_rate)
        self.model = model.pulp
        self.model += self.step + price * moved

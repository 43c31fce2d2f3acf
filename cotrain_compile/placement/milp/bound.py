"""Bound: the step time that no plan within the budgets can beat, by the relaxed program.

What it certifies, and under which assumptions, is in `docs/placement.md`.

Beside: a function that runs on a thread while its caller goes on.

Unlike a `ThreadPoolExecutor`'s, its thread is waited for by nobody but who asks for the result:
neither an error in the caller nor the end of the program waits. Nor does who asks, longer than it
says.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from math import isfinite
from typing import Generic, TypeVar

from cotrain_compile.machine import Tier
from cotrain_compile.placement.decisions.decisions import DecisionSpace
from cotrain_compile.placement.decisions.find_decisions import decision_space
from cotrain_compile.placement.milp.highs_process import Stop
from cotrain_compile.placement.milp.model import MIB
from cotrain_compile.placement.milp.program import Program
from cotrain_compile.placement.milp.solvers import solve_program
from cotrain_compile.placement.problem import Problem
from cotrain_compile.placement.work import PER_ENTRY_OF_PROGRAM, PER_OP_OF_SPACE, Allowance

# The bound is stated to a tenth of a percent, however roughly a plan is looked for.
GAP = 1e-3


def certified_bound_s(
    problem: Problem,
    solver: str,
    *,
    work: Allowance,
    seed: int,
    cyclic: bool,
    recompute: bool = False,
) -> float:
    """The optimum of the relaxed program in seconds; `cyclic` where steps overlap.

    With `recompute` it holds for plans that make forward values again, each for all that need it
    and, on copies of its own, for whatever is made apart.
    Where `work` runs out, or there is no solver, the solver's bound so far, and at the least what
    the device alone has to compute, with the exchanges that it waits for.
    """
    # What is made again, and exchanges that begin early, change which ops run between which.
    by_op = not (recompute or any(op.awaits for op in problem.dataflow.ops))
    space = decision_space(
        problem, at_peaks=True, everything=True, recompute=recompute, by_op=by_op, behind=True
    )
    only_there_s = max(_only_on_device_s(space), space.network.chain_s)
    relaxed = Program(
        space,
        problem.budgets[Tier.DEVICE] / MIB,
        problem.budgets[Tier.HOST] / MIB,
        relaxed=True,
        cyclic=cyclic,
    )
    work.meter.charge(PER_OP_OF_SPACE * len(space.problem.dataflow.ops))
    work.meter.charge(PER_ENTRY_OF_PROGRAM * relaxed.linear.entries)
    solution = solve_program(relaxed, solver, work=work, gap=GAP, seed=seed)
    if not isfinite(solution.bound_s):
        return only_there_s
    # Ops that go along with an exchange may run in other buckets than where the program has them.
    return max(only_there_s, solution.bound_s - space.network.shifted_s)


def _only_on_device_s(space: DecisionSpace) -> float:
    """Seconds of all that runs nowhere else: no updates, and of the rest what no strategy saves."""
    least = sum(min(effect.only_device_s for effect in each) for each in space.effects)
    return max(0.0, sum(space.seconds) + least)


T = TypeVar("T")


class OnThread(Generic[T]):
    """Runs `work`, from now on. As a context, it stops what `work` solves when that ends early."""

    def __init__(self, work: Callable[[], T]) -> None:
        self._stop = Stop()
        self._future: Future[T] = Future()
        # A daemon: Python's end does not wait for it. It runs Python alone: what it solves is in
        # another process.
        threading.Thread(target=self._run, args=(work,), name="cotrain-bound", daemon=True).start()

    def __enter__(self) -> OnThread[T]:
        return self

    def __exit__(self, *_: object) -> None:
        if not self._future.done():
            self._stop.now()

    def result(self, within_s: float) -> T | None:
        """What `work` returned, None where it has not in so many seconds; raises what it raised."""
        try:
            return self._future.result(within_s)
        except TimeoutError:
            return None

    def result_by(self, seconds: float) -> T:
        """What `work` returned; after so many seconds nothing is solved for it any more."""
        if self.result(seconds) is None:
            self._stop.now()
        return self._future.result()

    def _run(self, work: Callable[[], T]) -> None:
        try:
            with self._stop.within():
                self._future.set_result(work())
        except BaseException as error:  # for the one who asks
            self._future.set_exception(error)

"""First step: before a plan's first step everything runs once without writing anything.

Where that runs out of device memory, no parameter or state has changed, and the step is planned
again: with what each piece of compiled code was seen to take beyond its plan as workspace of its
ops, or, where that is not known or nothing fits with it, for less by the measured overshoot, as
AutoTM does (Hildebrand et al., ASPLOS 2020, section 4.3). It has a dry run again within the whole
budget. Where no plan keeps to the budget the step is refused: it never runs above. What a dry run
took beyond its plan, and had, is noted in the plan. What another process has run dry, to the same
end, has no dry run again.

On a card the first call of a kernel may take memory that no later one does: Inductor tunes with a
buffer as large as the card's L2 cache, and with copies of what the kernel overwrites. So a
dry run there that came to its end above what is allowed is done once more before it counts, with
what the first has left on the card in tensors. Where the budget is the user's, what torch's
allocator has reserved there counts as well, since other processes cannot have it: above what is
allowed the step is planned again for less by as much, where that fits. A default budget leaves room
for it.

A later step may run out of a card's memory, too: others take some, or what is free is in pieces.
Where it has changed nothing it is planned and run dry again as the first, and run again with the
random numbers that it drew.
"""

from __future__ import annotations

import traceback
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import replace
from typing import Any

import torch

from cotrain_compile.backends.lifecycle.compiled_step import CompiledStep
from cotrain_compile.backends.lifecycle.kept_dry_runs import KeptDryRun, kept_dry_run
from cotrain_compile.backends.lifecycle.workspace import both, of_convolutions
from cotrain_compile.distribute.agree import ALONE, Overshoot, Together
from cotrain_compile.distribute.ranks import count_of_ranks
from cotrain_compile.errors import OutOfDeviceMemory, PlacementError
from cotrain_compile.machine import Tier
from cotrain_compile.runtime.allocations import is_profiled
from cotrain_compile.runtime.cuda.card import is_out_of_memory
from cotrain_compile.support.units import format_bytes

ROUNDS = 3
# The part of a plan that a new round takes off at least, if what is left is enough: where a card's
# memory is in pieces, an allocation fails though the sum of all is below the budget.
LEAST_STEP = 0.05
# The part of what was too much that a plan which knows it leaves free besides, if the rest is
# enough: cut elsewhere, the same ops take about as much, and not the same.
ROOM = 0.25

_DRY_RUN = "a dry run of the step"
_NOT_IN_PIECES = (
    "with PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True before the process starts memory "
    "is not in pieces"
)


class AfterDryRun:
    """Runs a `CompiledStep`, the first time after a dry run.

    `compile_within(device_bytes, inputs, workspace)` compiles it, planned for so much, None: for
    the budget; `workspace` has bytes that kernels take beside what is known of them, by op. Where
    `replans` is false a dry run that fails is the end. `tell` is called with a step that took
    more of the device than planned, when its plan's last note says so. What an allocator reserves
    beside tensors counts where `counts_reserved`. The first call is inside
    `shown()`. A process after this one finds the dry run where `settings`, with what else the
    step was compiled, have the same repr.
    """

    def __init__(
        self,
        compile_within: Callable[[int | None, Sequence[Any], Mapping[str, int]], CompiledStep],
        inputs: Sequence[Any],
        *,
        replans: bool = True,
        tell: Callable[[CompiledStep], None] = lambda compiled: None,
        shown: Callable[[], AbstractContextManager[None]] = nullcontext,
        together: Together = ALONE,
        settings: object = None,
        counts_reserved: bool = True,
    ) -> None:
        self._compile_within = compile_within
        self._tell = tell
        self._shown = shown
        self._together = together
        self._settings = settings
        self._counts_reserved = counts_reserved
        self._rounds = ROUNDS if replans else 0
        # For all later steps. Other ranks would wait too long, also those of a pipeline's turns.
        is_alone = together is ALONE and count_of_ranks() == 1
        self._rounds_later = self._rounds if is_alone else 0
        self._had_dry_run = False
        self._first_over_bytes = 0  # by how much the last dry run was above where it stopped
        self._workspace: Mapping[str, int] = {}  # that `compiled` is planned with
        self.compiled = compile_within(None, inputs, {})

    def __call__(self, inputs: list[Any]) -> Any:
        if self._had_dry_run:
            return self._later_step(inputs)
        with self._shown():
            kept = self._kept(inputs)
            if kept is not None and self._is_known(kept):
                return self._first_step(inputs, kept)
            self._dry_run(inputs)
            if (kept := self._kept(inputs)) is not None:
                kept.keep(self.compiled.peak_bytes)
            return self.compiled(inputs)

    def _later_step(self, inputs: list[Any]) -> Any:
        if not self._rounds_later:
            return self.compiled(inputs)
        drawn = self.compiled.random_states()
        try:
            return self.compiled(inputs)
        except RuntimeError as error:
            if self.compiled.has_changed_something or not _is_out_of_device_memory(error):
                raise
            _free_frames(error)
            short = error
        _draw_again_from(drawn)
        self._rounds_later -= 1
        worst = Overshoot(self._overshoot_bytes(short), 0, True, {})
        if not self._plans_again(worst, short, inputs, what="a step"):
            raise short
        self._had_dry_run = False
        return self(inputs)

    def _kept(self, inputs: Sequence[Any]) -> KeptDryRun | None:
        """Where the dry run of the step as it is now compiled is kept, if it is."""
        if self._together is not ALONE:  # another rank may need a dry run
            return None
        return kept_dry_run(self.compiled, inputs, self._settings)

    def _is_known(self, kept: KeptDryRun) -> bool:
        """Whether the step had a dry run in another process, and fits its budgets here."""
        peaks = kept.peak_bytes()
        # A step under a profiler of the user's cannot see what compiled code takes inside.
        if peaks is None or is_profiled():
            return False
        host_bytes = self.compiled.plan.budgets[Tier.HOST]
        if peaks[Tier.DEVICE] > self.compiled.allowed_bytes or peaks[Tier.HOST] > host_bytes:
            return False
        self.compiled.dry_run_device_bytes = peaks[Tier.DEVICE]
        self._had_dry_run = True
        self._note_surplus(peaks[Tier.DEVICE])
        return True

    def _first_step(self, inputs: list[Any], kept: KeptDryRun) -> Any:
        """The step that another process has run dry, which says whether it takes as much here."""
        known = self.compiled
        try:
            return self._later_step(inputs)
        finally:
            if known.peak_bytes[Tier.DEVICE] > (known.dry_run_device_bytes or 0) or (
                self.compiled is not known
            ):
                kept.forget()

    def _dry_run(self, inputs: Sequence[Any]) -> None:
        for left in range(self._rounds, -1, -1):
            error, own_bytes, worst = self._overshoot(inputs)
            if worst.most_bytes and not worst.ran_out and not self.compiled.is_metered:
                error, own_bytes, worst = self._overshoot(inputs, again=True)
            if worst.most_bytes == 0:
                break
            if left and self._plans_again(worst, error, inputs):
                continue
            if worst.over_bytes == 0:
                self._note(f"{self._told_of(worst, error)}; no plan for less was found")
                break
            error = error or self._above_the_budget(own_bytes)
            _add(
                error,
                "No parameter or optimizer state was changed by this step. Raise memory_budget "
                f"by {format_bytes(worst.over_bytes)} or more, or free memory on the device.",
            )
            raise error
        self._had_dry_run = True
        self._note_surplus(self.compiled.peak_bytes[Tier.DEVICE])

    def _overshoot(
        self, inputs: Sequence[Any], *, again: bool = False
    ) -> tuple[Exception | None, int, Overshoot]:
        """A dry run: its error, by how much this process was above, and the worst of all ranks."""
        error = self._out_of_memory(inputs, again=again)
        own_bytes = self._overshoot_bytes(error)
        beyond = self.compiled.beyond_plan() if own_bytes else {}
        pieces_bytes = 0 if error is not None else self._pieces_bytes()
        own = Overshoot(own_bytes, self._first_over_bytes, error is not None, beyond, pieces_bytes)
        return error, own_bytes, self._together.worst(own)

    def _above_the_budget(self, own_bytes: int) -> OutOfDeviceMemory:
        """Of a dry run that came to its end: a card has more than the step may take."""
        if own_bytes == 0:
            told = "the step needs more memory than its budget on another rank"
            return OutOfDeviceMemory(told, tier=Tier.DEVICE)
        budget_bytes = self.compiled.plan.budgets[Tier.DEVICE]
        slack_bytes = self.compiled.allowed_bytes - budget_bytes
        beside = f" and {format_bytes(slack_bytes)} for libraries" if slack_bytes else ""
        return OutOfDeviceMemory(
            f"the step needs {format_bytes(self.compiled.peak_bytes[Tier.DEVICE])} on the device, "
            f"budget {format_bytes(budget_bytes)}{beside}: compiled code and libraries hold more "
            "than its ops one by one",
            tier=Tier.DEVICE,
        )

    def _pieces_bytes(self) -> int:
        """By how much more was reserved on a card than the step may take."""
        reserved_bytes = self.compiled.measured_reserved_bytes or 0
        return max(0, reserved_bytes - self.compiled.allowed_bytes) if self._counts_reserved else 0

    def _note_surplus(self, peak_bytes: int) -> None:
        """Note in the plan what the dry run took of the device beyond it."""
        compiled = self.compiled
        surplus_bytes = peak_bytes - self._planned_bytes()
        if surplus_bytes > 0:
            told = (
                f"a dry run took {format_bytes(peak_bytes)} on the device, "
                f"{format_bytes(surplus_bytes)} more than planned op by op: what compiled code"
                f"{'' if compiled.is_metered else ', its tuning'} and libraries hold"
            )
            self._note(told)

    def _note(self, told: str) -> None:
        self.compiled.plan = replace(self.compiled.plan, notes=(*self.compiled.plan.notes, told))
        self._tell(self.compiled)

    def _out_of_memory(self, inputs: Sequence[Any], *, again: bool) -> Exception | None:
        """The error of a dry run that ran out of device memory; raises every other."""
        self._first_over_bytes = 0
        try:
            self.compiled.dry_run(inputs, again=again)
        except RuntimeError as error:
            if not _is_out_of_device_memory(error):
                raise
            _free_frames(error)
            self._first_over_bytes = self._overshoot_bytes(error)
            if isinstance(error, OutOfDeviceMemory):
                self._measure_all(inputs)
            return error
        return None

    def _measure_all(self, inputs: Sequence[Any]) -> None:
        """Know what is behind the first allocation above the budget, where the meter stopped."""
        with suppress(OutOfDeviceMemory):  # of the host, which the next plan may spare
            self.compiled.measure_peak(inputs)

    def _overshoot_bytes(self, error: Exception | None) -> int:
        """What has to come off the plan: 0 where its dry run kept to the budget.

        An emulated device fails above its budget; a card fails below the plan, with what it had.
        Where the plan was reached all the same, what failed may be what libraries take beside it,
        as a tuner does that wants memory as large as the card's cache.
        """
        peak_bytes = self.compiled.peak_bytes[Tier.DEVICE]
        over_bytes = peak_bytes - self.compiled.allowed_bytes
        if error is None or over_bytes > 0:
            return max(0, over_bytes)
        missing_bytes = self._planned_bytes() - peak_bytes
        if missing_bytes > 0:
            return missing_bytes
        return max(1, self.compiled.allowed_bytes - self.compiled.plan.budgets[Tier.DEVICE])

    def _plans_again(
        self,
        worst: Overshoot,
        error: Exception | None,
        inputs: Sequence[Any],
        what: str = _DRY_RUN,
    ) -> bool:
        """Plan again, as `_other_plans` says; False where nothing fits into what is left."""
        told = self._told_of(worst, error, what)
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
        refusals: list[tuple[int, PlacementError]] = []
        for plan_bytes, workspace in self._other_plans(worst):
            try:
                self.compiled = self._compile_within(plan_bytes, inputs, workspace)
            except PlacementError as refusal:
                refusals.append((plan_bytes, refusal))
                continue
            self._workspace = workspace
            most_bytes = max(workspace.values(), default=0)
            beside = f", with up to {format_bytes(most_bytes)} inside of an op" if workspace else ""
            warnings.warn(
                f"cotrain: {told}; nothing was changed, and it is planned again for "
                f"{format_bytes(plan_bytes)}{beside}",
                stacklevel=2,
            )
            if worst.over_bytes == 0:
                self._note(f"planned for {format_bytes(plan_bytes)}, as {told}")
            return True
        if error is not None:
            why = self._nearest(refusals)
            _add(error, f"{told[:1].upper()}{told[1:]}. Less does not fit: {why}.")
        return False

    def _nearest(self, refusals: Sequence[tuple[int, PlacementError]]) -> str:
        """The plan that lacked least, in terms of the user's budget.

        A refusal itself is of what was tried to keep to, and calls that the budget.
        """
        left_bytes, refusal = min(refusals, key=lambda tried: tried[1].shortfall_bytes)
        budget = format_bytes(self.compiled.plan.budgets[Tier.DEVICE])
        left = format_bytes(left_bytes) if left_bytes > 1 else "nothing"
        where = "" if refusal.tier is Tier.DEVICE else f" of the {refusal.tier}"
        return (
            f"of memory_budget, {budget}, a plan has {left} beside what kernels take, and lacks "
            f"{format_bytes(refusal.shortfall_bytes)}{where}"
        )

    def _told_of(self, worst: Overshoot, error: Exception | None, what: str = _DRY_RUN) -> str:
        """What was taken that should not have been."""
        peak = format_bytes(self.compiled.peak_bytes[Tier.DEVICE])
        if worst.over_bytes == 0:
            budget = format_bytes(self.compiled.plan.budgets[Tier.DEVICE])
            reserved = format_bytes(self.compiled.measured_reserved_bytes or 0)
            return (
                f"torch's allocator reserved {reserved} in {what}, for tensors of {peak}, budget "
                f"{budget}; {_NOT_IN_PIECES}"
            )
        return (
            f"{what} took {peak} on the device, where {format_bytes(self._planned_bytes())} were "
            "planned" + (", and ran out of it" if error else "")
        )

    def _other_plans(self, worst: Overshoot) -> Sequence[tuple[int, Mapping[str, int]]]:
        """Device bytes and workspace of the plans to try next, the best first.

        The workspace was measured in the segments of one plan. The next plan is cut elsewhere, so
        if it can it leaves room, the more the more there was too much. Where all of it fits
        nowhere, convolutions may have taken it alone: the next dry run tells.
        """
        planned_bytes = self._planned_bytes()
        over_bytes = worst.most_bytes
        least_bytes = int(LEAST_STEP * planned_bytes) if worst.ran_out else 0
        first_bytes = worst.first_bytes or over_bytes
        lesses = dict.fromkeys((max(over_bytes, least_bytes), over_bytes, first_bytes))
        # Without workspace as if nothing were known: what one plan takes inside, another may not.
        for_less = [
            (max(1, planned_bytes - less), workspace)
            for workspace in ((self._workspace, {}) if self._workspace else ({},))
            for less in lesses
        ]
        # At last: memory in pieces refuses one that is large long before all is taken, so that half
        # as much less may do. The next dry run tells.
        if worst.ran_out:
            for_less += [(max(1, planned_bytes - over_bytes // part), {}) for part in (2, 4)]
        if not worst.beyond:
            return for_less
        budget_bytes, known = self.compiled.allowed_bytes, both(self._workspace, worst.beyond)
        least = LEAST_STEP * budget_bytes
        rooms = dict.fromkeys((max(least, ROOM * over_bytes), least, 0))
        fitting = [max(1, int(budget_bytes - room)) for room in rooms]
        inside = [known]
        if alone := of_convolutions(self.compiled.problem, worst.beyond):
            inside.append(both(self._workspace, alone))
        return [*((nbytes, each) for nbytes in fitting for each in inside), *for_less]

    def _planned_bytes(self) -> int:
        """What the plan needs, which is at most what it was allowed."""
        return self.compiled.plan.predicted.peak_bytes[Tier.DEVICE]


def _is_out_of_device_memory(error: Exception) -> bool:
    of_the_plan = isinstance(error, OutOfDeviceMemory) and error.tier == Tier.DEVICE
    return of_the_plan or is_out_of_memory(error)


def _free_frames(error: Exception) -> None:
    """The tensors in the frames that it came through would live as long as the error."""
    traceback.clear_frames(error.__traceback__)


def _draw_again_from(states: Sequence[tuple[int | None, torch.Tensor]]) -> None:
    for card, state in states:
        if card is None:
            torch.set_rng_state(state)
        else:
            torch.cuda.set_rng_state(state, card)


def _add(error: Exception, sentence: str) -> None:
    """Say `sentence` in the message of `error` itself: a log has that alone, and no notes."""
    message, *rest = error.args
    error.args = (f"{str(message).rstrip('.')}. {sentence}", *rest)

"""Compile: the steps from a user's training step to a `CompiledStep`, put in order.

`cotrain` is what torch.compile calls for `backend="cotrain"`; `compile_step` reads like the list of
types in `docs/architecture.md`.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from torch import fx

from cotrain_compile.analysis.symbolic import at
from cotrain_compile.backends.devices import (
    compute_device_of,
    refuse_gradients_of_hosted,
    refuse_other_devices,
    runs_on_cuda,
    runtime_for,
    tell_of_unused_card,
)
from cotrain_compile.backends.inductor.lower import LoweredStep, lower
from cotrain_compile.backends.lifecycle.compiled_step import CompiledStep
from cotrain_compile.backends.lifecycle.deferred import Owner, guard_state
from cotrain_compile.backends.lifecycle.dry_run import AfterDryRun
from cotrain_compile.backends.lifecycle.per_shape import PerShape
from cotrain_compile.backends.verify import VerifiedStep, refuse_race
from cotrain_compile.capture import Session, capture, current_session, install
from cotrain_compile.capture.aten.aot import traced_modules
from cotrain_compile.capture.dynamo.recompiles import why_again
from cotrain_compile.capture.offline.only_trace import hand_back_if_only_traced
from cotrain_compile.dataflow import Dataflow
from cotrain_compile.distribute.agree import Together, ranks_of, tell_of_refusal
from cotrain_compile.distribute.ranks import warn_where_ranks_train_apart
from cotrain_compile.entry.check_options import check_options
from cotrain_compile.entry.choose_plan import differ_in_updates_alone
from cotrain_compile.entry.compiled import (
    Origin,
    first_fingerprint,
    last_run,
    planned_for_less,
    register,
)
from cotrain_compile.entry.planner import Planner, profile_of
from cotrain_compile.errors import CaptureError, OptionError, PlacementError
from cotrain_compile.extract.extract import extract
from cotrain_compile.graph import StepGraph
from cotrain_compile.options import Options, as_option_error
from cotrain_compile.options.parts import LoweringOptions
from cotrain_compile.passes import run_passes
from cotrain_compile.placement.problem import Problem
from cotrain_compile.placement.recompute.rewrite import recomputed_ops
from cotrain_compile.plan import Plan
from cotrain_compile.runtime.cuda.setup import tell_if_in_pieces, within_free_memory
from cotrain_compile.runtime.host.kernels import host_kernels
from cotrain_compile.runtime.process.load_into_homes import load_into_homes
from cotrain_compile.viz.dump import dump_step
from cotrain_compile.viz.text.live import live_line
from cotrain_compile.viz.text.narrate import Narrator, phase_line, verbosity


def cotrain(
    module: fx.GraphModule,
    example_inputs: Sequence[Any],
    *,
    options: Mapping[str, Any] | None = None,
    mode: str | None = None,
) -> Callable[..., Any]:
    """The backend behind `torch.compile(step, backend="cotrain", options={...})`."""
    session = current_session()
    if session is None:
        raise CaptureError('call it as torch.compile(step, backend="cotrain")')
    if mode is not None:
        raise OptionError(
            f"backend 'cotrain' has no mode {mode!r}; leave it out, and give settings of Inductor "
            'as options, such as options={"inductor": {"max_autotune": True}}'
        )

    if session.last_reason is not None:
        Narrator(verbosity(session.options)).tell_again(why_again(session.last_reason))
    modules = {id(m): m for _, met in traced_modules() for m in met.modules()}
    owners: list[Owner] = [*modules.values(), *(record.optimizer for record in session.optimizers)]

    def compile_captured(step: StepGraph, values: Sequence[Any]) -> Callable[..., Any]:
        hand_back_if_only_traced(step, values)
        refuse_other_devices(step, session.options)
        tell_of_unused_card(step, session.options)
        warn_where_ranks_train_apart(step, session.code)
        together = ranks_of(step, session.code)
        together.require_same_step(step, session.options.check_replicas)
        dataflow = extract(step, with_strides=_is_compiled(step, session.options))
        captured = _Captured(step, dataflow, _origin(session, owners), together)
        return together.told_of_failures(captured.compiled_for(values))

    run = capture(session, module, example_inputs, compile_captured)
    for record in session.optimizers:
        load_into_homes(record.optimizer)
    return run


def _origin(session: Session, owners: Sequence[Owner]) -> Origin:
    keeping = frozenset(session.keeping_gradient)
    refs = tuple(weakref.ref(owner) for owner in owners)
    code, objects, options = session.code, session.frame_objects, session.options
    live = live_line((code, objects), options)
    return Origin(code, objects, options, keeping, refs, live)


@dataclass(frozen=True)
class _Captured:
    """A captured step, with its sizes as symbols; it is compiled for the sizes of each batch."""

    step: StepGraph
    dataflow: Dataflow
    origin: Origin
    together: Together

    def compiled_for(self, values: Sequence[Any]) -> Callable[..., Any]:
        """What runs it, compiled for the inputs `values`, and for others when they come."""
        symbols = self.dataflow.symbols
        if not symbols:
            return self._for_sizes({}, values)
        per_shape = PerShape(self.step, symbols, self._for_sizes)
        if runs_on_cuda(self.step):
            per_shape.compile_traced(values)
        return per_shape

    def _for_sizes(self, sizes: Mapping[str, int], tensors: Sequence[Any]) -> Callable[..., Any]:
        options = self.origin.options
        run = AfterDryRun(
            partial(self._compile_within, at(self.dataflow, sizes)),
            tensors,
            replans=options.plan is None,
            tell=self._tell_surplus,
            shown=partial(phase_line, options, phase="first step"),
            together=self.together,
            settings=options,
            counts_reserved=options.memory_budget is not None,
        )
        return VerifiedStep(run, self.step, options) if options.verify else run

    def _tell_surplus(self, compiled: CompiledStep) -> None:
        Narrator(verbosity(self.origin.options)).tell_surplus(compiled.plan)
        self._dump(compiled)

    def _compile_within(
        self,
        dataflow: Dataflow,
        budget_bytes: int | None,
        inputs: Sequence[Any],
        workspace: Mapping[str, int],
    ) -> CompiledStep:
        """The step of the sizes in `dataflow`, planned for so many bytes; None: for the budget.

        Its kernels are planned with a workspace in bytes by op, beside what is known of them. On a
        CUDA device it moves the inputs that are the user's to their homes. While the backend is
        called that costs no new trace: what Dynamo checks of a tensor is noted after it.
        """
        step, origin, options = self.step, self.origin, self.origin.options
        cuda = runs_on_cuda(step)
        before = last_run(origin)
        if not (cuda or options.plan is not None or _is_the_same_training(before, dataflow)):
            before = None
        if cuda:
            options = within_free_memory(options, inputs, compute_device_of(step))
        placement = None if before is None else before.plan.placement
        planner = Planner(options, placement, None, workspace, self.together)
        limits = [budget_bytes]
        if before is not None and cuda and budget_bytes is None:
            # Homes that moved make a new trace, to which the card has no more than to the last.
            # What does not fit into that, as a larger batch, is tried within the budget.
            limits = [planned_for_less(before), None]
        compiled = first_that_fits(
            lambda limit: compile_step(step, dataflow, replace(planner, plan_bytes=limit), options),
            limits,
        )
        if cuda:
            refuse_gradients_of_hosted(compiled, inputs, origin.keeping_gradient)
            tell_if_in_pieces(compiled.predicted_reserved, inputs, compute_device_of(step))
            compiled.bring_home(inputs)
        if origin.live is not None:
            compiled.step_ended = origin.live.watch(compiled.plan)
        if options.overlap_steps:
            owners = [owner for ref in origin.owners if (owner := ref()) is not None]
            guard_state(compiled, compiled.deferred, owners)
        register(compiled, origin)
        self._dump(compiled)
        return compiled

    def _dump(self, compiled: CompiledStep) -> None:
        """Write what the option `dump` asks for.

        A step that is traced anew as another one, since a learning rate has changed, say, goes in a
        folder of its own: the plan in the folder itself is that which the next run begins with.
        """
        options = self.origin.options
        if options.dump is None:
            return
        with as_option_error("dump", options.dump):
            folder, fingerprint = Path(options.dump), compiled.problem.dataflow.fingerprint
            if fingerprint != first_fingerprint(self.origin):
                folder /= f"step-{fingerprint}"
            profile = profile_of(options)
            dump_step(folder, self.step, compiled.problem, compiled.plan, compiled.graph, profile)


def _is_the_same_training(before: CompiledStep | None, dataflow: Dataflow) -> bool:
    """Whether only what optimizers compute is another: a search would find the same again."""
    return before is not None and differ_in_updates_alone(
        before.problem.dataflow.fingerprint, dataflow.fingerprint
    )


def first_that_fits(
    compile_for: Callable[[int | None], CompiledStep], limits: Sequence[int | None]
) -> CompiledStep:
    """The step compiled within the first of these device bytes that a plan fits into.

    None is the budget. Raises the `PlacementError` of the last.
    """
    *others, last = dict.fromkeys(limits)
    for limit in others:
        with suppress(PlacementError):
            return compile_for(limit)
    return compile_for(last)


def compile_step(
    step: StepGraph, dataflow: Dataflow, planner: Planner, options: Options
) -> CompiledStep:
    """Place, rewrite and lower `step`, whose `dataflow` has the sizes to plan for."""
    narrator = Narrator(verbosity(options))
    allowed = planner.problem(
        step,
        dataflow,
        captured=options.host_kernels == "captured",
        compiled=_is_compiled(step, options),
    )
    problem, plan = planner.plan(allowed)
    placed = run_passes(step, plan, narrator.observer)
    if options.verify:
        refuse_race(placed)
    narrator.tell(problem, plan)
    kernels = host_kernels(placed, options.host_kernels, planner.guesses_below(problem, plan))
    device = runtime_for(placed, allowed.under(plan.placement), plan, kernels, options)
    lowered = None
    if _is_compiled(step, options):
        lowered = _lowered(step, placed, allowed, plan, options, exact=planner.recomputes_exactly)
    return CompiledStep(problem, plan, placed, device, lowered, planner.together)


def _lowered(
    step: StepGraph,
    placed: StepGraph,
    problem: Problem,
    plan: Plan,
    options: LoweringOptions,
    *,
    exact: bool,
) -> LoweredStep:
    """The compiled segments of `placed`, where what is made again is `exact` the same."""
    names = plan.placement.recomputed if exact else ()
    whole = problem.splitting(plan.placement.splits).dataflow
    again = recomputed_ops(whole, names, plan.placement.recomputed_apart)
    dataflow, settings = problem.under(plan.placement).dataflow, options.inductor or {}
    apart = {*again, *again.values()}  # one code for both, whatever surrounds them
    return lower(step, placed, dataflow, settings, options.eager_segments, apart)


def _is_compiled(step: StepGraph, options: LoweringOptions) -> bool:
    return options.lowering_on(compute_device_of(step).type) != "eager"


def _our_options(compiler_fn: object) -> Mapping[str, Any] | None:
    """The user's options when `compiler_fn` stands for this backend, else None."""
    while hasattr(compiler_fn, "_torchdynamo_orig_backend"):
        compiler_fn = compiler_fn._torchdynamo_orig_backend
    if compiler_fn is cotrain:
        return {}
    if getattr(compiler_fn, "compiler_fn", None) is cotrain:
        options: Mapping[str, Any] = getattr(compiler_fn, "kwargs", {}).get("options") or {}
        return options
    return None


install(_our_options, check_options, tell_of_refusal, partial(phase_line, phase="tracing"))

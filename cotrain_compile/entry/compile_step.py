"""Compile: the steps from a user's training step to a `CompiledStep`, put in order.

`cotrain` is what torch.compile calls for `backend="cotrain"`; `compile_step` reads like the list of
types in `docs/architecture.md`.

Check options: what a user passed to `torch.compile`, with the files it names, becomes `Options`.

It runs when `torch.compile` is called, before anything is traced.
"""

from __future__ import annotations

import math
import os
import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from torch import fx

from cotrain_compile import presets
from cotrain_compile.analysis.costs import CostTable
from cotrain_compile.analysis.symbolic import at
from cotrain_compile.backends.devices import (
    compute_device_of,
    machine_for,
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
from cotrain_compile.capture.dynamo.compute_device import chosen_device
from cotrain_compile.capture.dynamo.recompiles import why_again
from cotrain_compile.capture.offline.only_trace import hand_back_if_only_traced
from cotrain_compile.cluster.model.strategy import Answer
from cotrain_compile.dataflow import Dataflow
from cotrain_compile.distribute.agree import ALONE, Together, ranks_of, tell_of_refusal
from cotrain_compile.distribute.ranks import warn_where_ranks_train_apart
from cotrain_compile.entry.choose_plan import (
    differ_in_updates_alone,
    plan_as_before,
    plan_for,
)
from cotrain_compile.entry.compiled import (
    Origin,
    first_fingerprint,
    last_run,
    planned_for_less,
    register,
)
from cotrain_compile.errors import CaptureError, OptionError, PlacementError
from cotrain_compile.extract.extract import extract
from cotrain_compile.files import kind_of, load
from cotrain_compile.graph import StepGraph
from cotrain_compile.machine import Tier
from cotrain_compile.options import Options, as_option_error
from cotrain_compile.options.parts import LoweringOptions, PlanningOptions
from cotrain_compile.passes import run_passes
from cotrain_compile.placement.check.check import check
from cotrain_compile.placement.problem import Problem, formulate
from cotrain_compile.placement.recompute.rewrite import recomputed_ops
from cotrain_compile.placement.saved import load_plan
from cotrain_compile.placement.simulate.outcomes import outcomes
from cotrain_compile.plan import Placement, Plan
from cotrain_compile.runtime.cuda.setup import tell_if_in_pieces, within_free_memory
from cotrain_compile.runtime.host.kernels import host_kernels
from cotrain_compile.runtime.process.load_into_homes import load_into_homes
from cotrain_compile.support.phases import tell_phase
from cotrain_compile.support.units import format_bytes
from cotrain_compile.viz.dump import dump_step
from cotrain_compile.viz.text.live import live_line
from cotrain_compile.viz.text.narrate import Narrator, phase_line, verbosity


def check_options(options: Mapping[str, Any]) -> Options:
    """`options` parsed, where they are right and the device and files they name are there.

    Raises `OptionError` naming the option, and `FormatError` where a file is not what it should be.
    """
    parsed = Options.parse(options)
    chosen_device(parsed.device)
    with as_option_error("machine", parsed.machine):
        presets.find(parsed.machine)
    if parsed.disk is not None and not os.path.isdir(parsed.disk):
        raise OptionError(f"option 'disk' is {parsed.disk!r}, but must be a folder that is there")
    if parsed.plan is not None:
        with as_option_error("plan", parsed.plan):
            _refuse_plan_of_ranks(parsed.plan)
            load_plan(parsed.plan)
    if parsed.profile is not None:
        load_profile(parsed.profile)
    return parsed


def _refuse_plan_of_ranks(path: str) -> None:
    """Raise `OptionError` where a plan says how ranks train, which a step alone does not know."""
    match kind_of(path):
        case "answer":
            best = load(path, Answer).best
            told = (
                "it has none that fits" if best is None else f"its best is {best.name}: {best.run}"
            )
            raise OptionError(
                f"plan {path} is an answer of `cotrain-compile cluster`: it says how the model is "
                f"spread over ranks, and each rank plans its step itself. Leave the option plan "
                f"out, and spread the model so; {told}"
            )
        case "stageplan":
            raise OptionError(
                f"plan {path} has the stages of a pipeline: give it and the model to "
                "cotrain_compile.pipeline, and leave the option plan out"
            )


def load_profile(path: str) -> CostTable:
    """The measured costs saved at `path`; raises as `check_options` does."""
    with as_option_error("profile", path):
        return load(path, CostTable)


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

    def compile_captured(step: StepGraph, values: Sequence[Any]) -> Callable[..., Any]:
        hand_back_if_only_traced(step, values)
        refuse_other_devices(step, session.options)
        tell_of_unused_card(step, session.options)
        warn_where_ranks_train_apart(step, session.code)
        together = ranks_of(step, session.code)
        together.require_same_step(step, session.options.check_replicas)
        dataflow = extract(step, with_strides=_is_compiled(step, session.options))
        origin = _origin(session, owners)

        def tell_surplus(compiled: CompiledStep) -> None:
            Narrator(verbosity(origin.options)).tell_surplus(compiled.plan)
            _dump(step, compiled, origin)

        def compile_for(sizes: Mapping[str, int], tensors: Sequence[Any]) -> Callable[..., Any]:
            compile_within = _compiler(origin, step, at(dataflow, sizes), together)
            replans = origin.options.plan is None
            run = AfterDryRun(
                compile_within,
                tensors,
                replans=replans,
                tell=tell_surplus,
                shown=partial(phase_line, origin.options, phase="first step"),
                together=together,
                settings=origin.options,
                counts_reserved=origin.options.memory_budget is not None,
            )
            return VerifiedStep(run, step, origin.options) if origin.options.verify else run

        if not dataflow.symbols:
            return together.told_of_failures(compile_for({}, values))
        per_shape = PerShape(step, dataflow.symbols, compile_for)
        if runs_on_cuda(step):
            per_shape.compile_traced(values)
        return together.told_of_failures(per_shape)

    modules = {id(m): m for _, met in traced_modules() for m in met.modules()}
    owners: list[Owner] = [*modules.values(), *(record.optimizer for record in session.optimizers)]
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


def _compiler(
    origin: Origin, step: StepGraph, dataflow: Dataflow, together: Together
) -> Callable[[int | None, Sequence[Any], Mapping[str, int]], CompiledStep]:
    """What compiles `step` for its inputs, planned for so many bytes (None: the device budget).

    Its kernels are planned with a workspace in bytes by op, beside what is known of them.

    On a CUDA device it moves the inputs that are the user's to their homes. While the backend is
    called that costs no new trace: what Dynamo checks of a tensor is noted after it.
    """
    cuda = runs_on_cuda(step)

    def compile_within(
        budget_bytes: int | None, inputs: Sequence[Any], workspace: Mapping[str, int]
    ) -> CompiledStep:
        options = origin.options
        before = last_run(origin)
        if not (cuda or options.plan is not None or _is_the_same_training(before, dataflow)):
            before = None
        if cuda:
            options = within_free_memory(options, inputs, compute_device_of(step))
        known: dict[str, Any] = {} if together is ALONE else {"together": together}
        if workspace:
            known["workspace"] = workspace
        placed = () if before is None else (before.plan.placement,)
        compile_for = partial(compile_step, step, dataflow, options, *placed, **known)
        limits = [budget_bytes]
        if before is not None and cuda and budget_bytes is None:
            # Homes that moved make a new trace, to which the card has no more than to the last.
            # What does not fit into that, as a larger batch, is tried within the budget.
            limits = [planned_for_less(before), None]
        compiled = first_that_fits(compile_for, limits)
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
        _dump(step, compiled, origin)
        return compiled

    return compile_within


def _is_the_same_training(before: CompiledStep | None, dataflow: Dataflow) -> bool:
    """Whether only what optimizers compute is another: a search would find the same again."""
    return before is not None and differ_in_updates_alone(
        before.problem.dataflow.fingerprint, dataflow.fingerprint
    )


def first_that_fits(
    compile_for: Callable[..., CompiledStep], limits: Sequence[int | None]
) -> CompiledStep:
    """The step compiled within the first of these device bytes that a plan fits into.

    None is the budget. Raises the `PlacementError` of the last.
    """
    *others, last = ({} if n is None else {"plan_bytes": n} for n in dict.fromkeys(limits))
    for less in others:
        with suppress(PlacementError):
            return compile_for(**less)
    return compile_for(**last)


def compile_step(
    step: StepGraph,
    dataflow: Dataflow,
    options: Options,
    before: Placement | None = None,
    plan_bytes: int | None = None,
    workspace: Mapping[str, int] | None = None,
    together: Together = ALONE,
) -> CompiledStep:
    """Place, rewrite and lower `step`, whose `dataflow` has the sizes to plan for.

    Where the placement `before`, of the same training, fits it is used again. The plan keeps to
    `plan_bytes` on the device, if any; the step may take all of the budget. `workspace` has bytes
    that kernels were seen to take while they run, beside what `dataflow` knows, by op. The ranks
    that train `together` have one plan.
    """
    if workspace:
        dataflow = dataflow.with_workspace(workspace)
    if not together.plans_alike:
        dataflow = dataflow.with_own_plans()
    machine = machine_for(step, options)
    compiled_code = _is_compiled(step, options)
    allowed = formulate(
        dataflow,
        machine,
        together.least(options.budgets(machine)),
        _profile(options),
        captured=options.host_kernels == "captured",
        compiled=compiled_code,
    )
    problem = allowed if plan_bytes is None else allowed.with_budget(Tier.DEVICE, plan_bytes)
    narrator = Narrator(verbosity(options))
    plan = together.plan(
        lambda: (
            (before and plan_as_before(problem, options, before, compiled=compiled_code))
            or plan_for(problem, options, compiled_code, _tell_planning)
        )
    )
    check(problem, plan)
    if workspace:
        plan = replace(plan, notes=(*plan.notes, _workspace_told(workspace)))
    if problem is not allowed:
        plan = replace(plan, budgets=allowed.budgets)
    placed = run_passes(step, plan, narrator.observer)
    if options.verify:
        refuse_race(placed)
    narrator.tell(problem, plan)
    kernels = host_kernels(placed, options.host_kernels, _guesses_below(problem, plan, options))
    under = allowed.under(plan.placement)
    device = runtime_for(placed, under, plan, kernels, options)
    lowered = _lowered(step, placed, allowed, plan, options)
    return CompiledStep(problem, plan, placed, device, lowered, together)


def _guesses_below(problem: Problem, plan: Plan, options: PlanningOptions) -> float:
    """The share of wrong guesses below which updates on guesses run, where there are any."""
    adapts = bool(plan.speculations) and options.speculate == "auto"
    return outcomes(problem, plan).pays_below if adapts else math.inf


def _tell_planning(stage: str) -> None:
    tell_phase(f"planning: {stage}")


def _workspace_told(workspace: Mapping[str, int]) -> str:
    return (
        f"{len(workspace)} ops are planned with a workspace of up to "
        f"{format_bytes(max(workspace.values()))}, which compiled code and kernels took inside in "
        "a dry run"
    )


def _dump(step: StepGraph, compiled: CompiledStep, origin: Origin) -> None:
    """Write what the option `dump` asks for.

    A step that is traced anew as another one, since a learning rate has changed, say, goes in a
    folder of its own: the plan in the folder itself is that which the next run begins with.
    """
    if origin.options.dump is not None:
        with as_option_error("dump", origin.options.dump):
            folder, fingerprint = Path(origin.options.dump), compiled.problem.dataflow.fingerprint
            if fingerprint != first_fingerprint(origin):
                folder /= f"step-{fingerprint}"
            profile = _profile(origin.options)
            dump_step(folder, step, compiled.problem, compiled.plan, compiled.graph, profile)


def _lowered(
    step: StepGraph, placed: StepGraph, problem: Problem, plan: Plan, options: Options
) -> LoweredStep | None:
    """The compiled segments of `placed`; None where its ops run as they are."""
    if not _is_compiled(step, options):
        return None
    names = plan.placement.recomputed if options.recompute == "exact" else ()
    whole = problem.splitting(plan.placement.splits).dataflow
    again = recomputed_ops(whole, names, plan.placement.recomputed_apart)
    dataflow, settings = problem.under(plan.placement).dataflow, options.inductor or {}
    apart = {*again, *again.values()}  # one code for both, whatever surrounds them
    return lower(step, placed, dataflow, settings, options.eager_segments, apart)


def _is_compiled(step: StepGraph, options: LoweringOptions) -> bool:
    return options.lowering_on(compute_device_of(step).type) != "eager"


def _profile(options: PlanningOptions) -> CostTable | None:
    return None if options.profile is None else load_profile(options.profile)


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

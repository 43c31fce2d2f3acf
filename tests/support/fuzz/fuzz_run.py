"""Runs a random program in eager, as captured, and placed, and compares what the three leave.

In: a `Spec`. Out: an `Outcome`, or a `Broken` that says which promise does not hold: numbers,
budgets, tensors that stay alive, compiles, or an error that is not one of ours.
"""

from __future__ import annotations

import gc
import re
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from torch._dynamo.utils import counters
from torch.utils._pytree import tree_leaves, tree_map

import cotrain_compile
from cotrain_compile.analysis.liveness import liveness
from cotrain_compile.backends.lifecycle.compiled_step import CompiledStep
from cotrain_compile.dataflow import PERSISTENT_ROLES
from cotrain_compile.errors import (
    CotrainError,
    LoweringError,
)
from cotrain_compile.extract.extract import extract
from cotrain_compile.graph import StepGraph
from cotrain_compile.machine import MEMORIES, Tier
from cotrain_compile.options import Options
from tests.support.fuzz.fuzz_checks import (
    check_compiles,
    check_meter,
    check_nothing_changed,
    check_views,
    checked_refusal,
    require_sound_plans,
)
from tests.support.fuzz.fuzz_compare import (
    Broken,
    Left,
    Spread,
    compare,
    compiled_corrections,
    gaps,
    magnitudes,
    nudge,
    nudged,
)
from tests.support.fuzz.fuzz_parts import (
    make_batches,
    make_edits,
    make_masters,
    make_model,
    make_optimizers,
    make_step,
)
from tests.support.fuzz.fuzz_specs import Spec
from tests.support.fuzz.fuzz_ways import forced
from tests.support.steps import Step, all_tensors, compiling_with

Compile = Callable[[Step], Step]
# The last steps of a program, after which tensors are counted.
COUNTED = 3
# Runs of eager that show how far one rounding leads a program.
NUDGED_RUNS = 3
# How far fused kernels may lead: they compute bias corrections in float64, captured ops in float32.
FUSED = 1e-5
# A tensor is rounding and nothing else where in float64 it is smaller by this; sums in another
# order, as those of parts, then leave something of another size.
ROUNDING_ONLY, OTHER_SIZE = 1e-4, 16


@dataclass(frozen=True)
class Outcome:
    """`status` is "equal", "refused", or "no program" where eager itself fails.

    `way` is that of the spec, see `fuzz_ways`, if the plan has taken it.
    """

    status: str
    message: str = ""
    tasks: int = 0
    way: str = ""


def run(spec: Spec) -> Outcome:
    """Run `spec` three times and compare; raises `Broken`."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with compiled_corrections():
            try:
                eager = train(spec, None)
            except Exception as error:
                return Outcome("no program", f"{type(error).__name__}: {error}"[:300])
        try:
            unplaced, whole = train_unplaced(spec)
            placed = train_placed(spec, whole)
        except LoweringError as error:
            after = run(replace(spec, options=as_advised(error, spec.options)))
            return Outcome("refused" if after.status == "equal" else after.status, str(error))
        except CotrainError as error:
            return Outcome("refused", checked_refusal(error, spec.options))
        finally:
            cotrain_compile.synchronize()
            require_sound_plans()
        relative, spread = rounding(spec), cache(lambda: spread_of(spec, eager))
        compare(eager, unplaced, "the captured step and eager", relative, spread)
        who = "the placed and the captured step"
        if is_exact(spec.options) and not spec.parts:
            compare(unplaced, placed, who, 0)
        else:
            fused = partial(spread_of_fused, spec, eager, spread)
            compare(unplaced, placed, who, max(relative, FUSED), fused)
    return Outcome("equal", tasks=placed.tasks, way=placed.way)


def as_advised(error: LoweringError, options: Mapping[str, Any]) -> dict[str, Any]:
    """The options with the way on of the error; `Broken` where it names none that is new."""
    named = re.search(r'options=\{"eager_segments": \[(.*?)\]', str(error))
    segments = re.findall(r"'([^']+)'", named[1]) if named else []
    if not segments or set(segments) <= set(options.get("eager_segments", ())):
        raise Broken(f"refused by {type(error).__name__}: {error}") from error
    return {**options, "eager_segments": [*options.get("eager_segments", ()), *segments]}


def is_exact(options: Mapping[str, Any]) -> bool:
    """Whether the placed step promises the bits of the captured one."""
    captured = options.get("host_kernels") == "captured"
    return bool(captured and options.get("lowering") != "inductor")


def rounding(spec: Spec) -> float:
    """How far two runs may be apart, relative to the largest element of a tensor."""
    if spec.loop.autocast or "bfloat16" in spec.model.layers:
        return 0.1
    # Its steps hang on the sign of a gradient, which may be rounding only.
    if spec.optimizer.name == "Rprop":
        return 0.05
    return 1e-12 if spec.model.dtype == "float64" else 1e-5


def spread_of(spec: Spec, eager: Left) -> dict[str, float]:
    """By how much roundings alone may lead a run away from `eager`, by tensor.

    A program may lean on a difference of near equals, such as the gradient behind a batch norm
    over two equal rows: then a rounding is all that there is of it, and grows from step to step. So
    the program is measured: how far the widest of some runs of eager goes, for one rounding of the
    parameters and batches at the start. Every step rounds them once, and what it rounds grows for
    fewer steps than that.
    """
    found: dict[str, float] = {}
    for seed in range(NUDGED_RUNS):
        with compiled_corrections():
            rounded = train(spec, None, nudged_by=seed)
        for name, far in gaps(eager, rounded).items():
            found[name] = max(found.get(name, 0.0), len(spec.loop.rows) * far)
    return found


def spread_of_fused(spec: Spec, eager: Left, spread: Spread) -> dict[str, float]:
    """As `spread_of`, and how far the corrections in float64 of fused kernels may lead a run.

    Under autocast a fused kernel keeps in float32 what eager rounds to bfloat16, so that it may be
    as far from eager as a run without autocast is, in either direction: that is all there is of a
    gradient that is none but for roundings, as that of a bias before a batch norm.
    """
    corrected, sizes = gaps(eager, train(spec, None)), magnitudes(eager)
    if spec.loop.autocast:
        unrounded = train(replace(spec, loop=replace(spec.loop, autocast=False)), None)
        for name, far in gaps(eager, unrounded).items():
            corrected[name] += 2 * far
    is_rounded = spec.parts or spec.options.get("lowering") == "inductor"
    if is_rounded and spec.model.dtype == "float32":
        for name in rounding_only(spec, sizes):
            corrected[name] += OTHER_SIZE * sizes[name]
    return {n: corrected[n] + far + rounding(spec) * sizes[n] for n, far in spread().items()}


def rounding_only(spec: Spec, sizes: Mapping[str, float]) -> list[str]:
    """The tensors of which float64 leaves next to nothing, by the `sizes` that they have in eager.

    So is a second moment of a bias before a batch norm, whose gradient is zero but for roundings.
    What is nothing behind the first step may be something later: an optimizer that divides by the
    size of a gradient goes a whole step wherever roundings point, and is pulled back from there.
    """
    wide = replace(spec, model=replace(spec.model, dtype="float64"))
    once = replace(spec.loop, rows=spec.loop.rows[:1], rates=spec.loop.rates[:1])
    begun, begun_wide = (magnitudes(train(replace(s, loop=once), None)) for s in (spec, wide))
    exact = magnitudes(train(wide, None))
    return [
        name
        for name, size in sizes.items()
        if exact[name] < ROUNDING_ONLY * size
        or begun_wide.get(name, size) < ROUNDING_ONLY * begun.get(name, 0.0)
    ]


def train(
    spec: Spec,
    compile_with: Compile | None,
    *,
    counts: bool = False,
    nudged_by: int | None = None,
) -> Left:
    """Run the steps of `spec`, compiled by `compile_with`, or in eager where that is None.

    With `counts` the tensors alive after the last steps are counted. `nudged_by` is a seed by which
    parameters and batches are rounded once more.
    """
    torch._dynamo.reset()
    counters.clear()
    torch.manual_seed(spec.seed)
    dtype = getattr(torch, spec.model.dtype)
    model, batches = make_model(spec, dtype), make_batches(spec, dtype)
    if nudged_by is not None:
        nudge(model, nudged_by)
        generator = torch.Generator().manual_seed(nudged_by)
        batches = [(nudged(x, generator) if x.is_floating_point() else x, y) for x, y in batches]
    edits = make_edits(spec, model)
    masters = make_masters(spec, model)
    optimizers = make_optimizers(spec, model, masters, is_eager=compile_with is None)
    plain = make_step(spec, model, optimizers, edits, masters)

    def tensors() -> dict[str, Tensor]:
        wide = {f"master of {name}": q for name, (_, q) in masters.items()}
        own: dict[str, Tensor] = detached({**edits.tensors(), **wide})
        return {**all_tensors(model, [] if masters else optimizers), **own}

    step = compile_with(plain) if compile_with else plain
    left = Left()
    for i, batch in enumerate(batches):
        if spec.loop.rates:
            for optimizer in optimizers[:1]:
                optimizer.param_groups[0]["lr"] = spec.loop.rates[i]
        before = tensors() if compile_with else {}
        try:
            left.returned.append(detached(step(*batch)))
        except CotrainError as error:
            check_nothing_changed(before, tensors(), error)
            raise
        if counts and i >= len(batches) - COUNTED:
            cotrain_compile.synchronize()  # updates in flight hold tensors
            left.live_tensors.append(live_tensors() - len(tree_leaves(left.returned)))
    cotrain_compile.synchronize()
    left.tensors = {**tensors(), "random state": torch.get_rng_state()}
    return left


def train_unplaced(spec: Spec) -> tuple[Left, dict[Tier, int]]:
    """As the captured graph says, without a plan; also the bytes alive in it, by tier of a share.

    A share of the device is one of the peak of the step, a share of the host one of all tensors.
    """
    whole = dict.fromkeys(MEMORIES, 1)

    def as_captured(step: StepGraph, values: Sequence[Any], options: Options) -> Step:
        check_views(step)
        dataflow = extract(step)
        if not dataflow.symbols:
            whole[Tier.DEVICE] = max(whole[Tier.DEVICE], liveness(dataflow).peak_bytes)
            whole[Tier.HOST] = max(whole[Tier.HOST], dataflow.total_bytes(*PERSISTENT_ROLES))

        def run_graph(inputs: list[Any]) -> Any:
            with torch.no_grad():
                return step.module(*inputs)

        return run_graph

    options = {"keep_grads": spec.options.get("keep_grads", False)}
    with compiling_with(as_captured):
        left = train(spec, lambda step: torch.compile(step, backend="cotrain", options=options))
    return left, whole


def train_placed(spec: Spec, whole: Mapping[Tier, int]) -> Left:
    """With the options of `spec`: its shares are of `whole`."""
    options = dict(spec.options)
    for name, tier, share in (
        ("memory_budget", Tier.DEVICE, spec.device_share),
        ("host_memory_budget", Tier.HOST, spec.host_share),
    ):
        if share is not None:
            options[name] = max(1, int(share * whole[tier]))
    last: list[CompiledStep] = []

    def compile_with(step: Step) -> Step:
        compiled = torch.compile(step, backend="cotrain", options=options)

        def call(*batch: Tensor) -> Any:
            returned = compiled(*batch)
            last[:] = [cotrain_compile.inspect(compiled)]
            check_meter(last[0], is_exact=options.get("lowering") != "inductor")
            return returned

        return call

    gc.freeze()  # what is alive now is not looked at when tensors are counted
    try:
        with forced(spec) as way:
            options |= way.options
            left = train(spec, compile_with, counts=True)
    finally:
        gc.unfreeze()
    check_compiles(spec)
    settled = len(spec.loop.rows) > COUNTED and len(set(spec.loop.rows)) == 1
    if settled and all(a < b for a, b in pairwise(left.live_tensors)):
        raise Broken(f"tensors alive after each step: {left.live_tensors}")
    left.tasks, left.way = len(last[0].plan.tasks), way.taken(last[0].plan)
    return left


def live_tensors() -> int:
    gc.collect()
    return sum(issubclass(type(thing), Tensor) for thing in gc.get_objects())


def detached(value: Any) -> Any:
    return tree_map(lambda t: t.detach().clone() if isinstance(t, Tensor) else t, value)

"""Ways of planning and tracing that a random program meets too seldom by chance: drawn on purpose.

In: a seed. Out: a spec with a way, which says how it is run: regions in parts, with micro-batches
in packs of layers; a run of layers that are alike, in checkpoints; states on disk, beside updates
that go on under the next step. `forced` makes the search take such a plan.
"""

from __future__ import annotations

import importlib
import random
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from typing import Any
from unittest import mock

from cotrain_compile.capture.layers import lower
from cotrain_compile.machine import Tier
from cotrain_compile.placement.problem import Problem
from cotrain_compile.placement.search import solve
from cotrain_compile.placement.search.settings import SolveSettings
from cotrain_compile.plan import Plan
from tests.support.fuzz.fuzz_layers import AGAIN
from tests.support.fuzz.fuzz_specs import APART, OptimizerSpec, Spec, with_layouts

# Seeds below, by the millions that campaigns add to them, are of programs in no way.
FIRST_IN_WAYS = 1_000_000
IN_PARTS, ALIKE, ON_DISK = "regions in parts", "alike layers in checkpoints", "states on disk"
# By kind of region, the numbers of parts.
PARTS = {"loss": (2, 3, 4), "mlp": (2, 4)}
# Layers of which a run may be alike; those without random numbers may stand outside a checkpoint.
REPEATED = ("checkpointed", "checkpointed dropout", "checkpointed attention", "residual")
# What is large for states of models as small as these: a block, and what a drive takes at a time.
LEAST_BYTES, PIECE_BYTES = 4096, 8192
_OF_DISK = (
    "plan.on_disk",
    "placement.simulate.from_disk",
    "runtime.disk.rooms",
    "runtime.disk.resting_kernel",
)


def campaign_spec(seed: int) -> Spec:
    """A program with layers of `fuzz_layouts`, in one of the ways or in none."""
    spec = with_layouts(seed)
    if seed % APART < FIRST_IN_WAYS:
        return spec
    rng = random.Random(f"ways {seed}")
    return rng.choice([_plain, _in_parts, _alike, _on_disk])(spec, rng)


def _plain(spec: Spec, rng: random.Random) -> Spec:
    return spec


def _in_parts(spec: Spec, rng: random.Random) -> Spec:
    """Losses and MLPs in parts; with several micro-batches, these in packs of layers or not."""
    layers = ["residual", *rng.sample(spec.model.layers, min(2, len(spec.model.layers)))]
    if rng.random() < 0.5:
        layers.append("checkpointed")
    rng.shuffle(layers)
    orders = ["auto", "by-layer", "as-written"]
    policies = ["auto", "resident", "zero-offload", "streamed", "greedy"]
    options = {
        **spec.options,
        "policy": rng.choice(policies),
        "micro_batch_order": rng.choice(orders),
        "plan_cache": False,
    }
    if spec.optimizer.name == "Rprop":
        options["verify"] = 0  # it goes by signs, which a rounding of a part may decide
    return replace(
        spec,
        way=IN_PARTS,
        parts={kind: rng.choice(numbers) for kind, numbers in PARTS.items()},
        # A loss is a region where its logits are wide, and not of float64.
        model=replace(
            spec.model,
            layers=_begun(layers),
            width=rng.choice([8, 16]),
            dtype=rng.choice(["float32", "float32", "float64"]),
            classes=96,
        ),
        loop=replace(spec.loop, rows=(8,) * 3, rates=(), micro_batches=rng.choice([1, 2, 2])),
        options=options,
    )


def _alike(spec: Spec, rng: random.Random) -> Spec:
    """A run of layers of one kind, and at times one that is not in the middle of it."""
    layers = [rng.choice(REPEATED)] * rng.randint(5, 8)
    if spec.model.layers and rng.random() < 0.5:
        layers.insert(rng.choice([0, 3, len(layers)]), rng.choice(spec.model.layers))
    options = {**spec.options, "checkpoints": rng.choice(["respect", "dissolve"])}
    return replace(
        spec, way=ALIKE, model=replace(spec.model, layers=_begun(layers)), options=options
    )


def _on_disk(spec: Spec, rng: random.Random) -> Spec:
    """Updates on the host by fused loops, with less of it than their states take."""
    layers = [*["residual"] * rng.randint(2, 3), *spec.model.layers[:1]]
    model = replace(
        spec.model, layers=_begun(layers), width=64, dtype=rng.choice(["float32", "float64"])
    )
    settings: Mapping[str, Any] = rng.choice([{"eps": 1e-2}, {"eps": 1e-2, "weight_decay": 0.1}])
    options = {
        **spec.options,
        "policy": rng.choice(["auto", "zero-offload", "zero-offload"]),
        "host_kernels": "fused",
        "machine": "rtx4090",  # whose preset has a drive: none is measured
        "overlap_steps": rng.random() < 0.7,
        "plan_cache": False,
    }
    return replace(
        spec,
        way=ON_DISK,
        model=model,
        optimizer=OptimizerSpec(rng.choice(["AdamW", "Adam"]), settings),
        loop=replace(spec.loop, by_hand="", masters=False, second=False, autocast=False),
        options=options,
        device_share=None,
        host_share=rng.uniform(0.6, 1.0),
    )


def _begun(layers: Sequence[str]) -> tuple[str, ...]:
    """Without uses of the first layer, which is another one now."""
    return tuple(kind for kind in layers if kind != AGAIN)


@dataclass
class Forced:
    """More options for a spec, and what became of its way."""

    spec: Spec
    options: dict[str, Any] = field(default_factory=dict)
    repeats: bool = False  # whether there are layers of which one is lowered for several

    def taken(self, plan: Plan) -> str:
        """The way of the spec, if `plan` or its trace has taken it."""
        taken = {
            IN_PARTS: bool(plan.placement.splits),
            ALIKE: self.repeats,
            ON_DISK: Tier.DISK in plan.placement.homes.values(),
        }
        return self.spec.way if taken.get(self.spec.way) else ""


@contextmanager
def forced(spec: Spec) -> Iterator[Forced]:
    """Within it the search takes a plan of the way of `spec`."""
    found, repeated = Forced(spec), lower._parts

    def noted(*args: Any) -> Any:
        parts = repeated(*args)
        found.repeats |= bool(parts)
        return parts

    with ExitStack() as stack:
        stack.enter_context(mock.patch.object(lower, "_parts", noted))
        if spec.parts:
            best = _in_these_parts(spec.parts)
            stack.enter_context(mock.patch.object(solve, "best_split", best))
        if spec.way == ON_DISK:
            found.options["disk"] = stack.enter_context(tempfile.TemporaryDirectory())
            for name in _OF_DISK:
                module = importlib.import_module(f"cotrain_compile.{name}")
                stack.enter_context(mock.patch.object(module, "PIECE_BYTES", PIECE_BYTES))
            stack.enter_context(mock.patch("cotrain_compile.plan.on_disk.LEAST_BYTES", LEAST_BYTES))
        yield found


def _in_these_parts(parts: Mapping[str, int]) -> Callable[..., Plan]:
    """In place of `best_split`: all regions in so many parts, as far as they have rows for it."""

    def plan(
        problem: Problem, settings: SolveSettings, incumbents: Sequence[Plan], climb: Any
    ) -> Plan:
        found = {r.name: min(parts[r.kind], r.length) for r in problem.dataflow.regions}
        splits = {name: number for name, number in found.items() if number > 1}
        if not splits:
            return climb(problem, settings, ())  # type: ignore[no-any-return]
        made: Plan = climb(problem.splitting(splits).as_its_own_step(), settings, ())
        return replace(made, placement=replace(made.placement, splits=splits))

    return plan

"""Runs a sequence of actions on a compiled training and on its twin in eager, side by side.

In: a `Sequence`. Out: an `Outcome`, or a `Broken` that names the action after which a promise did
not hold: numbers, exceptions, budgets, compiles, or a refusal that changed something.
"""

from __future__ import annotations

import random
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch._dynamo.utils import counters
from torch.utils._pytree import tree_leaves, tree_map

import cotrain_compile
from cotrain_compile.errors import CotrainError
from cotrain_compile.machine import Tier
from tests.support.closeness import gap, magnitude
from tests.support.fuzz.fuzz_compare import Broken
from tests.support.sequences.actions import ACTIONS
from tests.support.sequences.sequence import Sequence
from tests.support.sequences.twin import Setup, Step, Training, make_training

# Relative to the largest element of each tensor, which counts as no smaller than FLOOR: below that
# is what cancels to zero but for rounding.
ROUNDING = {torch.float64: 1e-9, torch.float32: 2e-3, torch.bfloat16: 1e-1}
FUSED, FLOOR = 1e-5, 1e-6
# Calls of one kind with nothing changed, after which none compiles: the first for what has changed,
# the second for what the first has made an input.
SETTLED_CALLS = 2


@dataclass
class Outcome:
    """How often each action held, and what was refused, by its first words."""

    held: Counter[str] = field(default_factory=Counter)
    refused: Counter[str] = field(default_factory=Counter)
    compiles: int = 0


def run(sequence: Sequence) -> Outcome:
    """Run it; raises `Broken`."""
    outcome = Outcome()
    torch._dynamo.reset()
    counters.clear()
    with warnings.catch_warnings(), _settings_kept():
        warnings.simplefilter("ignore")
        options = _options(sequence.setup)
        eager = make_training(sequence.setup, None)
        placed = make_training(sequence.setup, lambda step: _compiled(step, options))
        pair = _Pair(eager, placed, outcome)
        try:
            for number, (name, seed) in enumerate(sequence.actions):
                try:
                    pair.act(name, seed)
                except Broken as broken:
                    raise Broken(f"action {number}, {name}: {broken}") from broken
        finally:
            pair.leave()
        outcome.compiles = counters["stats"]["unique_graphs"]
    return outcome


@dataclass
class _Pair:
    """The twins, and whether rounding may be that of narrower numbers from now on."""

    eager: Training
    placed: Training
    outcome: Outcome
    relative: float = 0.0
    settled: int = 0

    def act(self, name: str, seed: int) -> None:
        """One action on both; raises `Broken` where they are not alike behind it."""
        before = self.placed.tensors()
        self.eager.calls_compiled = self.placed.calls_compiled = False
        with self.eager.at_work():
            expected, raised = _outcome(lambda: ACTIONS[name](self.eager, random.Random(seed)))
        graphs, number = counters["stats"]["unique_graphs"], self.placed.number
        state = self.placed.random_state
        with self.placed.at_work():
            found, error = _outcome(lambda: ACTIONS[name](self.placed, random.Random(seed)))
            after_wait = _outcome(cotrain_compile.synchronize)[1]
        error = error or after_wait
        if isinstance(error, CotrainError) and raised is None:
            self.check_nothing_changed(before, error)
            self.placed.number, self.placed.random_state = number, state
            found = self.act_in_eager(name, seed)
            self.outcome.refused[f"{name}: {type(error).__name__}: {error}"[:160]] += 1
        elif not _alike(raised, error):
            raise Broken(f"raised {_words(error)}, eager {_words(raised)}") from error
        else:
            self.outcome.held[name] += 1
        if error is not None and raised is not None and self.placed.calls_compiled:
            self.check_nothing_changed(before, error)
            self.eager.take(self.placed)  # in eager a step that fails has begun
        self.check_compiles(name, graphs)
        self.forget_gradients()
        self.compare(expected, found)
        self.check_budget()

    def act_in_eager(self, name: str, seed: int) -> Any:
        """What was refused, done as the message says: without this backend."""
        steps, self.placed.steps = self.placed.steps, self.placed.plain
        try:
            with self.placed.at_work():
                return ACTIONS[name](self.placed, random.Random(seed))
        finally:
            if self.placed.steps is self.placed.plain:
                self.placed.steps = steps

    def check_nothing_changed(self, before: dict[str, Tensor], error: Exception) -> None:
        after = self.placed.tensors()
        for name, value in before.items():
            is_state = name == "random state"
            if not is_state and (name not in after or not torch.equal(value, after[name])):
                raise Broken(f"{name} changed, though refused: {_words(error)}") from error

    def check_compiles(self, name: str, graphs: int) -> None:
        """Calls one after the other compile at first alone."""
        compiled = counters["stats"]["unique_graphs"] - graphs
        if name != "call":
            self.settled = 0
            return
        if compiled and self.settled >= SETTLED_CALLS:
            raise Broken(f"compiled again after {self.settled} actions of calls alone")
        self.settled += 1

    def forget_gradients(self) -> None:
        """A step that clears gradients first does not leave them (`keep_grads`)."""
        if self.placed.setup.options.get("keep_grads") or not self.placed.calls_compiled:
            return
        pairs = zip(self.eager.parameters(), self.placed.parameters(), strict=True)
        for mine, other in pairs:
            if other.grad is None:
                mine.grad = None

    def compare(self, expected: Any, found: Any) -> None:
        a, b = self.eager.tensors(), self.placed.tensors()
        if a.keys() != b.keys():
            raise Broken(f"has other tensors: {sorted(a.keys() ^ b.keys())}")
        self.relative = max(self.relative, self.rounding())
        for name, value in [*a.items(), *_leaves(expected)]:
            other = b[name] if name in b else dict(_leaves(found))[name]
            if (value.dtype, value.shape) != (other.dtype, other.shape):
                raise Broken(f"{name} is {other.dtype} {other.shape}, not {value.dtype}")
            if not (apart := distance(value, other)) <= self.relative:
                raise Broken(f"{name} is {apart:.2g} from eager's, {self.relative:.0g} allowed")

    def rounding(self) -> float:
        """Of the narrowest numbers that this training computes with."""
        narrow = torch.bfloat16 if self.placed.autocast else self.placed.dtype
        setup = self.placed.setup
        is_fused = setup.options.get("host_kernels") != "captured"
        # Of any parameters, bias corrections are float32, which Inductor rounds in its own order.
        is_compiled = setup.options.get("lowering") == "inductor" and "Adam" in setup.optimizer
        return max(ROUNDING[narrow], FUSED if is_fused or is_compiled else 0)

    def check_budget(self) -> None:
        for step in self.placed.steps.values():
            if step in self.placed.plain.values():
                continue
            try:
                compiled = cotrain_compile.inspect(step)
            except CotrainError:
                continue
            if compiled.measured is None:
                continue
            for tier, budget in compiled.plan.budgets.items():
                if compiled.measured.peak_bytes[tier] > budget:
                    peak = compiled.measured.peak_bytes[tier]
                    raise Broken(f"{peak} bytes on {tier}, {budget} allowed")

    def leave(self) -> None:
        """Take hooks of all modules away."""
        for training in (self.eager, self.placed):
            for handle in training.hooks:
                handle.remove()


def distance(a: Tensor, b: Tensor) -> float:
    """The largest difference of two elements, relative to the largest element of `a`."""
    return gap(a, b) / max(magnitude(a), FLOOR)


def _outcome(act: Callable[[], Any]) -> tuple[Any, Exception | None]:
    try:
        return tree_map(lambda t: t.detach().clone() if isinstance(t, Tensor) else t, act()), None
    except Exception as error:
        return None, error


def _alike(expected: Exception | None, found: Exception | None) -> bool:
    if expected is None or found is None:
        return expected is found
    return type(expected) is type(found) or isinstance(found, CotrainError)


def _words(error: Exception | None) -> str:
    return "nothing" if error is None else f"{type(error).__name__}: {error}"[:400]


def _leaves(value: Any) -> list[tuple[str, Tensor]]:
    leaves = [leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor)]
    return [(f"result {i}", leaf) for i, leaf in enumerate(leaves)]


def _compiled(step: Step, options: dict[str, Any]) -> Step:
    return torch.compile(step, backend="cotrain", options=options)


def _options(setup: Setup) -> dict[str, Any]:
    options = {"quiet": True, "work_limit": 1.0, **setup.options}
    if setup.device_share is not None:
        peak = resident_peak(setup.norm, setup.optimizer, setup.written)
        options["memory_budget"] = int(setup.device_share * peak)
    return options


@cache
def resident_peak(norm: str, optimizer: str, written: str) -> int:
    """What the step takes on the device with everything there."""
    setup = Setup(norm, optimizer, written, options={"policy": "resident", "quiet": True})
    training = make_training(setup, lambda step: _compiled(step, dict(setup.options)))
    with training.at_work():
        training.call("train", *training.batch())
        peak = cotrain_compile.inspect(training.steps["train"]).predicted.peak_bytes[Tier.DEVICE]
    torch._dynamo.reset()
    counters.clear()
    return peak


@contextmanager
def _settings_kept() -> Iterator[None]:
    """Settings of the process are afterwards as they were."""
    threads = torch.get_num_threads()
    is_deterministic = torch.are_deterministic_algorithms_enabled()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(is_deterministic)
        torch.set_default_dtype(torch.float32)
        torch.set_num_threads(threads)

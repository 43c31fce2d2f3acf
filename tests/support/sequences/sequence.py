"""Random sequences of actions: a seed in, a `Sequence` out, which prints as a program that runs it.

A sequence is plain data: a setup, and actions by name, each with the seed of what it draws.
`shrunk` yields simpler ones, `simplest` finds what a failure hangs on.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

from tests.support.sequences.actions import ACTIONS, WEIGHTS
from tests.support.sequences.twin import NORMS, OPTIMIZERS, WRITTEN, Setup

LENGTH = 14
INDUCTOR_SHARE = 0.15  # these take several times as long


@dataclass(frozen=True)
class Sequence:
    """Actions from left to right: the name, and the seed of what the action draws."""

    setup: Setup
    actions: tuple[tuple[str, int], ...]

    def __str__(self) -> str:
        return (
            "from tests.support.sequences.lock_step import run\n"
            "from tests.support.sequences.sequence import Sequence\n"
            "from tests.support.sequences.twin import Setup\n\n"
            f"print(run({self!r}))"
        )


def random_sequence(seed: int) -> Sequence:
    """The sequence with number `seed`: every second action is mostly a call."""
    rng = random.Random(seed)
    setup = _setup(rng)
    names = list(ACTIONS)
    weights = [WEIGHTS.get(name, 1) for name in names]
    actions = [("call", rng.randrange(100))]
    while len(actions) < LENGTH:
        actions.append((rng.choices(names, weights)[0], rng.randrange(100)))
        if rng.random() < 0.7:
            actions.append(("call", rng.randrange(100)))
    return Sequence(setup, (*actions, ("call", 0)))


def _setup(rng: random.Random) -> Setup:
    options: dict[str, Any] = {"plan_cache": False}
    policy = rng.choice(["resident", "zero-offload", "coarse", "streamed", "fraction:0.5", "auto"])
    options["policy"] = policy
    options["host_kernels"] = rng.choice(["captured", "captured", "fused"])
    options["overlap_steps"] = rng.random() < 0.5
    options["keep_grads"] = rng.random() < 0.3
    written = rng.choice(WRITTEN)
    if written == "clipped":
        options["speculate"] = rng.choice(["off", "on"])
    is_tight = policy == "auto" and rng.random() < 0.8
    setup = Setup(
        norm=rng.choice(list(NORMS)),
        optimizer=rng.choice(list(OPTIMIZERS)),
        written=written,
        dropout=rng.choice([0.0, 0.1]),
        options=options,
        device_share=rng.choice([0.6, 0.7, 0.85]) if is_tight else None,
    )
    return _lowered_and_remade(setup, rng)


def _lowered_and_remade(setup: Setup, rng: random.Random) -> Setup:
    """Some are compiled, of which few fit below what they take resident; some make values again."""
    options = dict(setup.options)
    if rng.random() < 0.3:
        options["recompute"] = rng.choice(["exact", "off"])
    if rng.random() < 0.3:
        options["remat"] = False
    if rng.random() < INDUCTOR_SHARE:
        options["lowering"] = "inductor"
        return replace(setup, options=options, device_share=None)
    return replace(setup, options=options)


def shrunk(sequence: Sequence) -> Iterator[Sequence]:
    """Simpler sequences: with fewer actions, longest cuts first, then of a plainer setup."""
    actions, length = sequence.actions, len(sequence.actions) // 2
    while length:
        for start in range(0, len(actions), length):
            left = actions[:start] + actions[start + length :]
            yield replace(sequence, actions=left)
        length //= 2
    plain = Setup()
    for name, value in vars(plain).items():
        if name != "options" and getattr(sequence.setup, name) != value:
            yield replace(sequence, setup=replace(sequence.setup, **{name: value}))
    for name in sequence.setup.options:
        left_options = {k: v for k, v in sequence.setup.options.items() if k != name}
        yield replace(sequence, setup=replace(sequence.setup, options=left_options))


def simplest(sequence: Sequence, breaks: Callable[[Sequence], bool]) -> Sequence:
    """The simplest that still breaks, of those that one cut after the other leads to."""
    for simpler in shrunk(sequence):
        if breaks(simpler):
            return simplest(simpler, breaks)
    return sequence

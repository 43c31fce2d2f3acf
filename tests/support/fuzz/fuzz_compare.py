"""Compares what two runs of a random program leave, by their roundings.

In: two `Left`. Nothing comes out where they are near enough, else a `Broken` that names the tensor.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from tests.support.closeness import as_tensor, gap, magnitude, same_bits


class Broken(AssertionError):
    """A promise that a program breaks."""


@dataclass
class Left:
    """What a program leaves: results, tensors, those alive after its last steps, tasks and way."""

    returned: list[Any] = field(default_factory=list)
    tensors: dict[str, Tensor] = field(default_factory=dict)
    live_tensors: list[int] = field(default_factory=list)
    tasks: int = 0
    way: str = ""


# Modules of torch.optim that turn a number of steps into a number of Python's.
WITH_STEP_COUNTS = ("adagrad", "adam", "adamax", "asgd", "nadam", "radam")
# By how much two runs of eager may differ in each tensor that only roundings tell apart.
Spread = Callable[[], Mapping[str, float]]


def compare(
    expected: Left, found: Left, who: str, relative: float, spread: Spread | None = None
) -> None:
    """Raise `Broken` where two runs are further apart than `relative`; 0 means in any bit.

    That is relative to the largest element of each tensor, however small that is. A tensor that is
    further away may differ by what `spread` says; whole numbers and truth values may not differ.
    """
    for name, a, b in _pairs(expected, found, who):
        if a.dtype != b.dtype or a.shape != b.shape:
            raise Broken(f"{name} is {b.dtype} {b.shape}, not {a.dtype} {a.shape}: {who}")
        if not (relative and a.is_floating_point()):
            if not same_bits(a, b):
                raise Broken(f"{name} differs in some bit: {who}")
            continue
        apart, size = gap(a, b), magnitude(a)
        if not apart <= relative * size:
            allowed = max(relative * size, spread().get(name, 0.0) if spread else 0.0)
            if not apart <= allowed:
                raise Broken(
                    f"{name} is {b.flatten()[:4]}..., not {a.flatten()[:4]}...: {who} are "
                    f"{apart:.2g} apart, rounding explains {allowed:.2g}"
                )


def gaps(expected: Left, found: Left) -> dict[str, float]:
    """By how much two runs differ, by the name of each tensor."""
    return {name: gap(a, b) for name, a, b in _pairs(expected, found, "two runs")}


def magnitudes(left: Left) -> dict[str, float]:
    """The largest element of each tensor, by name."""
    return {name: magnitude(a) for name, a, _ in _pairs(left, left, "a run and itself")}


def nudge(model: nn.Module, seed: int) -> None:
    """Round the parameters of `model` once more: each element stays, or goes to a neighbour."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for param in model.parameters():
            param.copy_(nudged(param, generator))


def nudged(value: Tensor, generator: torch.Generator) -> Tensor:
    """`value`, each element of which stays or goes to a neighbour."""
    up_or_down = torch.randint(-1, 2, value.shape, generator=generator)
    towards = value + up_or_down.to(value.dtype) * (1 + value.abs())
    return torch.nextafter(value, towards)


@contextmanager
def compiled_corrections() -> Iterator[None]:
    """Eager optimizers compute what hangs on the number of steps in float32, as compiled ones do.

    Both keep the number in a float32 tensor; in eager, torch makes it a number of Python's first.
    Bias corrections are up to 2e-5 apart then, in steps 1 and 2 with a beta of 0.999.
    """
    modules = (import_module(f"torch.optim.{name}") for name in WITH_STEP_COUNTS)
    with ExitStack() as patches:
        for module in modules:
            patches.enter_context(mock.patch.object(module, "_get_value", lambda x: x))
        yield


def _pairs(expected: Left, found: Left, who: str) -> Iterator[tuple[str, Tensor, Tensor]]:
    if expected.tensors.keys() != found.tensors.keys():
        raise Broken(f"{who} have other tensors: {expected.tensors.keys() ^ found.tensors.keys()}")
    one, other = tree_leaves(expected.returned), tree_leaves(found.returned)
    for i, (a, b) in enumerate(zip(one, other, strict=True)):
        if a is not None or b is not None:
            yield f"result {i}", as_tensor(a), as_tensor(b)
    for name, a in expected.tensors.items():
        yield name, a, found.tensors[name]

"""Trial: whether a fused kernel computes what its rule says, on this machine, by this torch.

In: a region, its captured ops and the fused kernel that the match of its update allows. Out:
whether both leave the same numbers, up to rounding, for values of every kind. That is no reason to
use a kernel: the match is. It is a check of ATen's loops, and of what stands around them.
"""

from __future__ import annotations

import itertools
import math
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import fx

from cotrain_compile.extract.optimizer_loops import NARROW
from cotrain_compile.machine import Tier
from cotrain_compile.runtime.host.fused_loops import Update
from cotrain_compile.runtime.meter import MemoryMeter

# Largest difference allowed between a fused kernel and the captured ops, relative to the change
# that the update makes: torch's compiled optimizers take bias corrections in float32, the fused
# kernels in float64.
TOLERANCE = 1e-3
# Beside that, in units of the last place of the largest value that an element had or has.
PLACES = 64

# What an element may be: of both signs, zero, tiny, of the size of an epsilon, common and huge.
MAGNITUDES = (0.0, 1e-30, 1e-8, 1e-4, 1e-2, 1.0, 1e3, 1e8)
UNUSUAL = (torch.inf, -torch.inf, torch.nan)
# Of a large tensor one draw has all of them many times over.
SEEDS, ENOUGH_ELEMENTS = 3, 1 << 12
# It then repeats itself: a region may read a few of the millions of gradients in a bucket. A prime,
# so that what reads another part of the bucket reads other numbers.
PERIOD = 4099
# Compared at a time: beside what a large update takes itself it is little memory.
PART_ELEMENTS = 1 << 20
# States that are sums of squares.
NEVER_NEGATIVE = frozenset({"exp_avg_sq", "max_exp_avg_sq", "sum"})

Kernel = Callable[[Sequence[Any], MemoryMeter], None]


def agree(
    region: fx.GraphModule,
    captured: Kernel,
    fused: Kernel,
    *,
    param: int,
    fixed: Mapping[int, torch.Tensor],
    never_negative: Sequence[int],
    skip: int | None,
) -> bool:
    """Whether both kernels turn the same inputs into the same parameter and states.

    `param` is the parameter's position; by position, too, `fixed` has values that are not drawn,
    and `never_negative` those that are sums of squares. What is narrow is drawn in float32, where
    both compute the same: how a loop rounds into less, `rounds_once` asks.
    """
    flags: tuple[bool | None, ...] = (None,) if skip is None else (True, False)
    values = [node.meta.get("val") for node in region.graph.find_nodes(op="placeholder")]
    sizes = [int(value.numel()) for value in values if isinstance(value, torch.Tensor)]
    seeds = range(1 if max(sizes) > ENOUGH_ELEMENTS else SEEDS)
    for seed, with_unusual, flag in itertools.product(seeds, (False, True), flags):
        inputs = list(_drawn(region, seed, with_unusual))
        for position in never_negative:
            inputs[position] = inputs[position].abs()
        for position, value in fixed.items():
            inputs[position] = value
        if skip is not None:
            inputs[skip] = torch.full_like(inputs[skip], bool(flag))
        if not _agree_on(inputs, captured, fused, param):
            return False
    return True


def _drawn(region: fx.GraphModule, seed: int, with_unusual: bool) -> Iterator[Any]:
    generator = torch.Generator().manual_seed(seed)
    magnitudes = torch.tensor(MAGNITUDES, dtype=torch.float64)
    for node in region.graph.find_nodes(op="placeholder"):
        value = node.meta.get("val")
        if not isinstance(value, torch.Tensor):
            yield 0.01
            continue
        shape = [int(size) for size in value.shape]
        made = torch.empty_strided(shape, [int(stride) for stride in value.stride()])
        if not shape:
            yield made.fill_(1.0 + 6.0 * seed).to(value.dtype)  # a step count or a coefficient
            continue
        made = made.to(_widened(value.dtype))
        count = min(made.numel(), PERIOD)
        chosen = torch.randint(len(MAGNITUDES), (count,), generator=generator)
        signed = torch.rand(count, generator=generator, dtype=torch.float64) * 2 - 1
        drawn = signed * magnitudes[chosen]
        if with_unusual and count:
            at = torch.randint(count, (len(UNUSUAL),), generator=generator)
            drawn[at] = torch.tensor(UNUSUAL, dtype=torch.float64)
        repeated = drawn.to(made.dtype).repeat(math.ceil(made.numel() / max(count, 1)))
        yield made.copy_(repeated[: made.numel()].view(shape))


def _widened(dtype: torch.dtype) -> torch.dtype:
    return torch.float32 if dtype in NARROW else dtype


def rounds_once(
    update: Update, dtypes: Mapping[str, torch.dtype], settings: Mapping[str, Any]
) -> bool:
    """Whether `update` leaves in narrow tensors what it leaves in float32, rounded once.

    `dtypes` are of the parameter and its states by name. As many elements as a loop does without
    a rest, which it may round otherwise.
    """
    generator = torch.Generator().manual_seed(0)

    def drawn(name: str, dtype: torch.dtype) -> torch.Tensor:
        if name == "step":
            return torch.full((), 3.0, dtype=dtype)
        values = torch.randn(ENOUGH_ELEMENTS, generator=generator)
        return (values.square() if name in NEVER_NEGATIVE else values).to(dtype)

    narrow = {name: drawn(name, dtype) for name, dtype in dtypes.items()}
    gradient = drawn("gradient", dtypes["param"])
    wide = {name: value.to(_widened(value.dtype), copy=True) for name, value in narrow.items()}
    try:
        update([narrow], [gradient], settings)
        update([wide], [gradient.float()], settings)
    except RuntimeError:
        return False  # a torch whose loop takes no such tensors
    return all(torch.equal(value, wide[name].to(value.dtype)) for name, value in narrow.items())


def _agree_on(before: Sequence[Any], captured: Kernel, fused: Kernel, param: int) -> bool:
    results = []
    for kernel in (captured, fused):
        inputs = [_copied(v) if isinstance(v, torch.Tensor) else v for v in before]
        with (
            torch.no_grad(),
            torch.random.fork_rng(devices=[]),  # both draw the same noise, and the user's is kept
            warnings.catch_warnings(),
        ):
            warnings.simplefilter("ignore")
            torch.default_generator.manual_seed(0)
            try:
                kernel(inputs, MemoryMeter(dict.fromkeys(Tier, 1 << 62)))
            except RuntimeError:
                if kernel is captured:
                    raise
                return False  # ATen's loop refuses such tensors, as states in another precision
        results.append(inputs)
    exact, fast = results
    # A weight that is no number in both is lost: `amsgrad` then keeps the old maximum in some
    # elements of ATen's loop, and not in others.
    lost = exact[param].isnan() & fast[param].isnan()
    return all(
        _close(old, right, found, lost if old.shape == lost.shape else None)
        for old, right, found in zip(before, exact, fast, strict=True)
        if isinstance(old, torch.Tensor)
    )


def _copied(value: torch.Tensor) -> torch.Tensor:
    """With the strides of `value`, which `clone` does not keep where they leave gaps."""
    return torch.empty_strided(value.size(), value.stride(), dtype=value.dtype).copy_(value)


def _close(
    old: torch.Tensor, exact: torch.Tensor, fast: torch.Tensor, lost: torch.Tensor | None
) -> bool:
    """Element by element, but for those `lost`; where one is not finite, the other is the same."""
    if not old.is_floating_point():
        return bool(torch.equal(exact, fast))
    if old.dim() and old.shape[0] > 1 and old.numel() > PART_ELEMENTS:
        rows = max(1, PART_ELEMENTS * old.shape[0] // old.numel())
        own = (value.split(rows) for value in (old, exact, fast))
        none = itertools.repeat(None)
        parts = zip(*own, none if lost is None else lost.split(rows), strict=False)
        return all(itertools.starmap(_close, parts))
    old, exact, fast = old.double(), exact.double(), fast.double()
    # Of what is finite; so is what differs from it by as much.
    change, largest = (exact - old).abs(), torch.maximum(old.abs(), exact.abs())
    allowed = torch.finfo(torch.float32).tiny + PLACES * torch.finfo(torch.float32).eps * largest
    near = (exact - fast).abs() <= allowed + TOLERANCE * change
    same = (exact == fast) | (exact.isnan() & fast.isnan()) | (near & change.isfinite())
    return bool((same if lost is None else same | lost).all())

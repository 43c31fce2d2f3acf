"""Op constants: what each class of op takes on a processor that waits for every op.

In: a device, and the rates of its products and its memory. Out: by class (`op_classes.classes_of`)
how many times its roofline an op takes, and the seconds that it takes besides. Both are those of a
line through what calls of several sizes take, each weighed by its own time. Sizes and classes take
turns, so that no call finds in the caches what the one before has left there for it, and a while in
which others had the cores falls on all of them.
"""

from __future__ import annotations

import math
import random
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from cotrain_compile.machine import TierSpec
from cotrain_compile.machine.op_classes import IN_A_ROW, VIEW, OpKind
from cotrain_compile.machine.parts import MOST_FACTOR
from cotrain_compile.runtime.calibrate.link_bench import Bench, Sizes
from cotrain_compile.runtime.calibrate.op_pieces import (
    CallWork,
    OpCalls,
    Operands,
    attention_pieces,
    convolution_pieces,
    memory_pieces,
    product_pieces,
    work_of,
)
from cotrain_compile.runtime.calibrate.op_rates import least_row_s, least_view_s

_SHAPES: Mapping[Callable[..., Iterator[OpCalls]], Sequence[tuple[int, ...]]] = {
    # Of what is limited by memory from 4 KiB to 8 MiB.
    memory_pieces: ((64, 8), (512, 64), (2048, 256), (4096, 512)),
    product_pieces: (
        *((32, 32, 64), (256, 256, 256), (512, 128, 512), (512, 768, 192), (256, 1024, 1024)),
    ),
    attention_pieces: ((2, 16, 16), (4, 64, 32), (4, 128, 64)),
    convolution_pieces: (
        *((3, 32, 3, 32), (16, 16, 3, 8), (32, 64, 3, 16), (64, 64, 3, 16), (96, 64, 1, 16)),
        *((16, 16, -3, 8), (64, 64, -3, 32), (192, 192, -3, 16)),
    ),
}
# So many behind one that is not counted.
_CALLS = 2
# How long a tensor may be where products have sides of one.
_LENGTHS_OF_A_SIDE = 4
# Results that are alive at once.
_KEPT = 16
# A start is told apart from the rest by calls of different sizes.
_FEWEST_SIZES = 2


@dataclass(frozen=True)
class Constants:
    """Factors and starts by class, and which classes have none for what reason."""

    factors: dict[str, float]
    starts_s: dict[str, float]
    remarks: tuple[str, ...] = ()


@dataclass(frozen=True)
class Taken:
    """What a call took, and what the rates allow."""

    roofline_s: float
    seconds: float


def constants_of(bench: Bench, tier: TierSpec, device: torch.device, sizes: Sizes) -> Constants:
    """Of all classes that a step on `device` has, whose rates are `tier`'s.

    A class whose calls took what no device takes has none, with a remark: it stays at its rates.
    """
    pieces = [*_pieces(device, sizes)]
    works = [work_of(piece) for piece in pieces]
    by_class: dict[str, dict[object, list[Taken]]] = {}
    for piece, work, seconds in zip(pieces, works, _seconds(bench, pieces, sizes), strict=True):
        found = by_class.setdefault(work.classes[0], {}).setdefault(piece.size, [])
        found.append(Taken(_roofline_s(work, tier), seconds))
    lines = {name: line([*map(_mean, found.values())]) for name, found in by_class.items()}
    doubted = {name: each for name, each in lines.items() if not _is_believed(*each)}
    known = {name: each for name, each in lines.items() if name not in doubted}
    plain_s = known.get(OpKind.POINTWISE, (0.0, 1.0))[0]
    repeats, until_s = sizes.repeats, sizes.until_s
    return Constants(
        {name: round(factor, 3) for name, (_, factor) in known.items()},
        {name: tier.launch_s + max(0.0, start - plain_s) for name, (start, _) in known.items()}
        | {
            VIEW: least_view_s(repeats, bench.seconds, until_s),
            IN_A_ROW: least_row_s(repeats, bench.seconds, until_s),
        },
        tuple(
            f"{name}: measured at {factor:.3g} times what the rates allow and {start:.3g} s "
            "besides, which no device takes; what the rates allow is assumed"
            for name, (start, factor) in doubted.items()
        ),
    )


def _mean(points: Sequence[Taken]) -> Taken:
    """Of calls of one size: a step has all of them."""
    count = len(points)
    return Taken(
        sum(each.roofline_s for each in points) / count,
        sum(each.seconds for each in points) / count,
    )


def _is_believed(start_s: float, factor: float) -> bool:
    return 1 / MOST_FACTOR <= factor <= MOST_FACTOR and start_s < 1.0


def _roofline_s(work: CallWork, tier: TierSpec) -> float:
    """Seconds by the rates alone, as `analysis.costs` has them."""
    return max(work.flops / tier.flops_per_s_of(work.dtype), work.nbytes / tier.bytes_per_s)


def _pieces(device: torch.device, sizes: Sizes) -> Iterator[OpCalls]:
    """In float32 and bfloat16, and products in float64, whose bytes are like others'."""
    longest = _LENGTHS_OF_A_SIDE * sizes.matmul_side
    for dtype in (torch.float32, torch.bfloat16, torch.float64):
        values = Operands(device, dtype)
        for made, shapes in _SHAPES.items():
            if dtype is not torch.float64 or made is product_pieces:
                for shape in shapes:
                    if max(shape) <= longest:
                        yield from (replace(piece, size=shape) for piece in made(values, *shape))


def _seconds(bench: Bench, pieces: Sequence[OpCalls], sizes: Sizes) -> Iterator[float]:
    """Of one call of each: the lower quartile of rounds in which each has a turn."""
    turns: list[list[float]] = [[] for _ in pieces]
    kept: deque[Any] = deque(maxlen=_KEPT)
    order, shuffled = [*range(len(pieces))], random.Random(0)
    for _ in range(sizes.repeats):
        shuffled.shuffle(order)
        for at in order:
            turns[at].append(_turn_s(bench, pieces[at], kept))
        if time.monotonic() >= sizes.until_s:
            break
    for found in turns:
        yield sorted(found)[len(found) // 4]


def _turn_s(bench: Bench, piece: OpCalls, kept: deque[Any]) -> float:
    """Of one call among several; the first of them brings the code into the caches.

    Results are `kept` for a while, as in a step: each is in memory that no cache holds.
    """
    given = [piece.arguments() for _ in range(_CALLS)]
    piece.op(*piece.arguments(), **piece.named)

    def calls() -> None:
        for arguments in given:
            kept.append(piece.op(*arguments, **piece.named))

    return bench.seconds(calls) / _CALLS


def line(points: Sequence[Taken]) -> tuple[float, float]:
    """The start, in seconds, and the factor that come nearest to all, by what each is off.

    Neither is below 0. Where all are of one size, all that they take is the factor's.
    """
    weighed = [(each.roofline_s, each.seconds, max(each.seconds, 1e-12) ** -2) for each in points]
    ones = sum(w for _, _, w in weighed)
    x, y = sum(w * a for a, _, w in weighed), sum(w * b for _, b, w in weighed)
    xx, xy = sum(w * a * a for a, _, w in weighed), sum(w * a * b for a, b, w in weighed)
    if not xx:  # nothing has an end
        return 0.0, math.inf
    through_zero = 0.0, xy / xx
    if len(points) < _FEWEST_SIZES:
        return through_zero
    spread = ones * xx - x * x
    start, factor = (y * xx - xy * x) / spread, (xy * ones - y * x) / spread
    if math.isfinite(start) and start < 0:
        return through_zero
    return start, factor

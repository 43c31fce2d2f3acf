"""Op rates: how fast a processor runs ops one by one.

In: how often to measure and with which clock. Out: seconds that an op of a step takes at the least;
of an update on the host, elements a second that ops read or write in parts that stay in the cache,
and bytes a second of memory that the system hands out for results.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, fx

from cotrain_compile.machine import Tier
from cotrain_compile.runtime.calibrate.link_bench import least_s, wall_s
from cotrain_compile.runtime.host.captured_kernels import CHUNK_ELEMENTS
from cotrain_compile.runtime.meter import MemoryMeter, MeteredGraph

aten = torch.ops.aten

Clock = Callable[[Callable[[], object]], float]

# Weights and states come from memory, part after part, as in an update.
_PARTS, _TENSORS = 24, 4
_UNLIMITED = dict.fromkeys(Tier, 1 << 62)
# In torch 2.13 what is captured of addcmul; where there is none, the op itself takes its place.
_prims_fma = getattr(torch.ops.prims, "fma", None)
# Ops that compute next to nothing; how many times as long as there an op takes in a step, which
# counts its bytes, frees values and notes when it ran, and whose data takes the code out of the
# caches: 2.5 times in one of 314 ops and 4.5 ms, 3.4 times in one of 1,788 and 0.4 s. Views, and
# ops in a row, have less of their own there and as much beside it.
_SMALL_SIDE, _SMALL_OPS, _IN_A_STEP, _LITTLE_IN_A_STEP = 4, 100, 3.0, 3.5
# Above what the C library keeps to be used again.
_FRESH_BYTES = 48 << 20


def least_op_s(repeats: int, clock: Clock = wall_s, until_s: float = math.inf) -> float:
    """Seconds of an op that computes next to nothing, in a step whose ops run one by one."""
    return _IN_A_STEP * _alone_s(_small_ops, repeats, clock, until_s)


def least_view_s(repeats: int, clock: Clock = wall_s, until_s: float = math.inf) -> float:
    """Of one that only shows its argument in another way."""
    return _LITTLE_IN_A_STEP * _alone_s(_views, repeats, clock, until_s)


def least_row_s(repeats: int, clock: Clock = wall_s, until_s: float = math.inf) -> float:
    """Of one of a row of ops that are alike, which run as one call for all of their tensors."""
    row = [_small() for _ in range(_SMALL_OPS)]
    seconds = least_s(partial(clock, lambda: torch._foreach_mul(row, 0.5)), repeats, until_s)
    return _LITTLE_IN_A_STEP * seconds / _SMALL_OPS


def _alone_s(
    ops: Callable[[Tensor, Tensor], Tensor], repeats: int, clock: Clock, until_s: float
) -> float:
    graph, meter = MeteredGraph(fx.symbolic_trace(ops), Tier.HOST), MemoryMeter(_UNLIMITED)
    given = [_small(), _small()]
    seconds = least_s(partial(clock, partial(graph, given, meter)), repeats, until_s)
    return seconds / _SMALL_OPS


def _small() -> Tensor:
    return torch.full((_SMALL_SIDE, _SMALL_SIDE), 0.1)


def _small_ops(a: Tensor, b: Tensor) -> Tensor:
    for _ in range(_SMALL_OPS // 4):
        total = aten.add.Tensor(a, b)
        a = aten.mm.default(aten.relu.default(aten.mul.Tensor(total, b)), b)
    return a


def _views(a: Tensor, b: Tensor) -> Tensor:
    for _ in range(_SMALL_OPS // 2):
        a = aten.view.default(aten.t.default(b), [_SMALL_SIDE, _SMALL_SIDE])
    return a


def elements_per_s(repeats: int, clock: Clock = wall_s, until_s: float = math.inf) -> float:
    """Of float32 and bfloat16 alike, in ops such as those of an update; as `least_s`."""
    free_a_large_result()
    ops, meter, seconds = (
        MeteredGraph(fx.symbolic_trace(_adamw), Tier.HOST),
        MemoryMeter(_UNLIMITED),
        0.0,
    )
    for dtype in (torch.float32, torch.bfloat16):
        parts = [_part(dtype) for _ in range(_PARTS)]

        def work(parts: list[list[Tensor]] = parts) -> None:
            for part in parts:
                ops(part, meter)

        seconds += least_s(partial(clock, work), repeats, until_s)
    return 2 * _PARTS * CHUNK_ELEMENTS * _ELEMENTS_TOUCHED / seconds


def free_a_large_result() -> None:
    """After that glibc keeps results up to 32 MiB, as in a process that has trained for a while.

    Its thresholds begin low and follow the largest block, of those it may keep, that is freed.
    """
    torch.ones(31 << 18)  # 31 MiB


def _part(dtype: torch.dtype) -> list[Tensor]:
    return [torch.full((CHUNK_ELEMENTS,), 0.01, dtype=dtype) for _ in range(_TENSORS)]


# What `_adamw` reads and writes for each element, as `Op.bytes_moved` counts it.
_ELEMENTS_TOUCHED = 32


def _fma(a: Tensor, b: Tensor, c: Tensor) -> Tensor:
    found: Tensor = _prims_fma.default(a, b, c) if _prims_fma else aten.addcmul.default(c, a, b)
    return found


def _adamw(param: Tensor, gradient: Tensor, first: Tensor, second: Tensor) -> None:
    """The ops of an update as they are captured."""
    decayed = aten.mul.Tensor(param, 0.999)  # 2 elements
    aten.copy_.default(first, aten.lerp.Scalar(first, gradient, 0.1))  # 3 and 2
    kept, new = aten.mul.Tensor(second, 0.999), aten.mul.Tensor(gradient, 1e-3)  # 2 and 2
    aten.copy_.default(second, _fma(new, gradient, kept))  # 4 and 2
    root = aten.div.Tensor(aten.sqrt.default(second), 0.999)  # 2 and 2
    step = aten.div.Tensor(first, aten.add.Tensor(root, 1e-8))  # 2 and 3
    aten.copy_.default(param, _fma(step, first, decayed))  # 4 and 2


def fresh_bytes_per_s(repeats: int, clock: Clock = wall_s, until_s: float = math.inf) -> float:
    """What a large result costs beyond being written: its pages are cleared and mapped."""
    a, b, kept = (torch.ones(_FRESH_BYTES // 4) for _ in range(3))
    fresh_s = least_s(partial(clock, partial(torch.mul, a, b)), repeats, until_s)
    written_s = least_s(partial(clock, partial(torch.mul, a, b, out=kept)), repeats, until_s)
    return _FRESH_BYTES / max(fresh_s - written_s, 1e-3 * written_s)

"""Mutants that no test can kill, by their name in `bench.reliability.mutants`: why not."""

from __future__ import annotations

_CHECK = "cotrain_compile/placement/check"
_HOST = "cotrain_compile/runtime/host"
_RANKS = "cotrain_compile/distribute"
_AGAIN = f"{_CHECK}/recomputed.py check_recomputed"
_ANY_NUMBER = "versions of a buffer are only asked whether they are equal, and no two are"
_NEVER = "never reached: it is there for the type checker"
_OTHER_DIGEST = "a digest of the same bits in another order, on every rank"
_SIZE_OF_PIECES = "pieces of another size: the numbers are the same, and only the time is another"

EQUIVALENT: dict[str, str] = {
    f"{_AGAIN}: 1 -> 2": _ANY_NUMBER,
    f"{_AGAIN}: 0 -> 1 (number 2)": _ANY_NUMBER,
    f"{_AGAIN}: versions.get(name, 0) + 1 -> versions.get(name, 0) - 1": _ANY_NUMBER,
    f"{_CHECK}/rules.py _check_direction: assert_never(task.direction) -> pass": _NEVER,
    f"{_CHECK}/replay.py _Replay._copy: assert_never(task.direction) -> pass": _NEVER,
    f"{_HOST}/fused_loops.py _adam: False -> True": (
        "never read: every group of torch's Adam and AdamW has decoupled_weight_decay"
    ),
    f"{_HOST}/gradient_prologue.py module: 1 -> 2": _SIZE_OF_PIECES,
    f"{_HOST}/gradient_prologue.py cache_rows: piece_elements() * source.shape[0] -> "
    "piece_elements() + source.shape[0]": _SIZE_OF_PIECES,
    f"{_RANKS}/replicas.py _words: 1 -> 2": _OTHER_DIGEST,
    f"{_RANKS}/replicas.py _in_order_of_memory: True -> False": _OTHER_DIGEST,
    f"{_RANKS}/same_numbers.py module: 8 -> 9": "of a table of nine numbers the numbers are told",
    f"{_CHECK}/copies.py peak: 2 -> 3": "one more tick behind the end, at which nothing is there",
}

"""The op that stands for a piece of what a step fetches in pieces.

`piece(source, begin, end)` are so many elements of `source` as one row, in memory of their own. The
pass that puts it in lets others replace it by the copy that a task has made: it never runs.
"""

from __future__ import annotations

import torch

_library = torch.library.Library("cotrain", "FRAGMENT")
_library.define("piece(Tensor source, int begin, int end) -> Tensor")


def _piece(source: torch.Tensor, begin: int, end: int) -> torch.Tensor:
    return source.new_empty(end - begin)


_library.impl("piece", _piece, "CompositeExplicitAutograd")

PIECE = torch.ops.cotrain.piece.default

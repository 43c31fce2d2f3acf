"""Text: the Python standard library's own sources as training data, and batches drawn from them."""

from __future__ import annotations

import sysconfig
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

CHARACTERS = 128


def standard_library() -> Tensor:
    """The modules at the top of the standard library as one run of ASCII codes (uint8).

    A character outside ASCII becomes "?".
    """
    sources = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    text = "\n".join(path.read_text(encoding="utf-8", errors="replace") for path in sources)
    codes = np.frombuffer(text.encode("ascii", errors="replace"), dtype=np.uint8)
    return torch.from_numpy(codes.copy())


def batch(text: Tensor, step: int, rows: int, length: int, seed: int) -> tuple[Tensor, Tensor]:
    """Inputs and targets of one step, `(rows, length)` each, the targets one character ahead.

    They depend on `seed` and `step` alone, so a resumed run reads what the whole one would have.
    """
    generator = torch.Generator().manual_seed(seed * 1_000_003 + step)
    starts = torch.randint(len(text) - length, (rows,), generator=generator)
    windows = text[starts[:, None] + torch.arange(length + 1)].long()
    return windows[:, :-1], windows[:, 1:]

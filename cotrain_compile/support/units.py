"""Numbers and names as people read and write them: sizes of memory as bytes, "20GiB", "80%"."""

from __future__ import annotations

import math
import numbers
import re
from dataclasses import dataclass
from fractions import Fraction


def format_bytes(nbytes: float) -> str:
    """`1536` -> "1.5 KiB"."""
    size = float(nbytes)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(size) < 1024:
            return f"{size:.0f} B" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} TiB"


def format_budget(nbytes: int) -> str:
    """As `format_bytes`; `20` -> "20 B (did you mean '20GiB'?)", since no step needs so little.

    `0` means none.
    """
    meant = f" (did you mean '{nbytes}GiB'?)" if 0 < nbytes < 1024 else ""
    return format_bytes(nbytes) + meant


def format_exactly(nbytes: int) -> str:
    """`1536` -> "1.5 KiB (1,536 bytes)", `448` -> "448 bytes"."""
    if nbytes < 1024:
        return f"{nbytes} byte" + "s" * (nbytes != 1)
    return f"{format_bytes(nbytes)} ({nbytes:,} bytes)"


def format_seconds(seconds: float) -> str:
    """`0.0123` -> "12.3 ms"."""
    if seconds >= 1:
        return f"{seconds:.2f} s"
    return f"{seconds * 1e3:.1f} ms" if seconds >= 1e-3 else f"{seconds * 1e6:.0f} µs"


def format_rate(bytes_per_s: float) -> str:
    """`2.5e10` -> "25 GB/s", `8.72e7` -> "87.2 MB/s"."""
    scale, unit = (1e9, "GB/s") if bytes_per_s >= 1e9 else (1e6, "MB/s")
    return f"{bytes_per_s / scale:.3g} {unit}"


def printable(text: str) -> str:
    """`text` with what a terminal would obey, or cannot show, as escapes; lines stay lines."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() or c in "\n\t" else ascii(c)[1:-1] for c in text)


# Powers of 1000, and of 1024 with an i: K, KB; Ki, KiB; ...
_UNITS = {
    "": 1,
    "b": 1,
    **{u + b: 1000 ** (i + 1) for i, u in enumerate("kmgtp") for b in ("", "b")},
    **{u + b: 1024 ** (i + 1) for i, u in enumerate("kmgtp") for b in ("i", "ib")},
}
# No tier has more, and sums of such sizes are still 64-bit integers.
_MOST_BYTES = 2**60
_SIZES = 'a number of bytes, a size such as "20GiB", or a percentage such as "80%"'


@dataclass(frozen=True)
class Size:
    """An amount of memory: so many bytes, or a fraction of what the tier has."""

    nbytes: int | None = None
    fraction: float | None = None

    @classmethod
    def parse(cls, value: object) -> Size:
        """From bytes (any whole number), "20GiB", "500 MB" or "80%".

        ValueError says what was expected.
        """
        if isinstance(value, Size):
            return value
        if isinstance(value, numbers.Real) and not isinstance(value, bool):
            return cls._of_bytes(
                int(value) if isinstance(value, numbers.Integral) else float(value)
            )
        number = r"\s*([+-]?\d+(?:\.\d+)?(?:[eE]\+?\d{1,2})?)\s*([a-zA-Z]*|%)\s*"
        match = re.fullmatch(number, value) if isinstance(value, str) else None
        if match is None:
            raise ValueError(_SIZES)
        count, unit = Fraction(match[1]), match[2].lower()
        if unit == "%":
            if not 0 < count <= 100:
                raise ValueError(f"above 0% and at most 100% of what the tier has: {_SIZES}")
            return cls(fraction=float(count) / 100)
        if unit not in _UNITS:
            raise ValueError(f"{_SIZES}; {match[2]!r} is no unit")
        nbytes = count * _UNITS[unit]
        return cls._of_bytes(nbytes if unit in ("", "b") else math.floor(nbytes))

    @classmethod
    def _of_bytes(cls, count: float | Fraction) -> Size:
        """So many bytes, where they are a whole number that a tier can have."""
        if not count > 0:
            raise ValueError(f"above 0: {_SIZES}")
        if count > _MOST_BYTES:
            raise ValueError(f"at most 1 EiB, which is more than any tier has: {_SIZES}")
        if count < 1 or count != int(count):
            raise ValueError(f"a whole number of bytes, at least 1: {_SIZES}")
        return cls(nbytes=int(count))

    def of(self, capacity_bytes: int) -> int:
        """Bytes, on a tier of `capacity_bytes`."""
        if self.nbytes is not None:
            return self.nbytes
        assert self.fraction is not None
        return max(1, int(self.fraction * capacity_bytes))

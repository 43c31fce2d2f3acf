"""Numbers and names as people read them."""

from __future__ import annotations


def format_bytes(nbytes: float) -> str:
    """`1536` -> "1.5 KiB"."""
    size = float(nbytes)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(size) < 1024:
            return f"{size:.0f} B" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} TiB"


def format_budget(nbytes: int) -> str:
    """As `format_bytes`; `20` -> "20 B (did you mean '20GiB'?)", since no step needs so little."""
    meant = f" (did you mean '{nbytes}GiB'?)" if nbytes < 1024 else ""
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

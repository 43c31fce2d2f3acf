"""Linear programs: the library that they are written with, pulp.

All else plans without it, so where it cannot be imported, only what makes a program fails.
"""

from __future__ import annotations

from typing import NoReturn

from cotrain_compile.errors import OptionError

__all__ = ["pulp"]


class _Absent:
    """In place of pulp: whatever is looked up in it raises `OptionError`."""

    def __init__(self, reason: ImportError) -> None:
        self._reason = str(reason)

    def __getattr__(self, name: str) -> NoReturn:
        raise OptionError(
            f"integer programs need pulp, which cannot be imported ({self._reason}): "
            "pip install pulp highspy"
        )


try:
    import pulp
except ImportError as error:
    pulp = _Absent(error)

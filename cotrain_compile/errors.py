"""Every error a user can get from this package. Each message says what, where, how to go on."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

from cotrain_compile.machine import Tier
from cotrain_compile.support.units import printable

ON_META = (
    "there they have no values to train. model.to_empty(device=...) gives them memory; then load a "
    "checkpoint or initialise them (reset_parameters()), and make the optimizer after that. To "
    "plan a model that is nowhere yet, use `cotrain-compile trace`"
)


def did_you_mean(value: object, known: Iterable[str]) -> str:
    """The one of `known` that `value` was meant to be, as words for behind it; "" where none is
    near. A hyphen and an underscore are one. Else the first of `known` that has all its words.
    """
    names = {name.replace("-", "_"): name for name in known}
    asked = str(value).replace("-", "_")
    near = difflib.get_close_matches(asked, names, n=1, cutoff=0.71)
    if not near and asked:
        words = set(asked.split("_"))
        near = [name for name in names if words <= set(name.split("_"))]
    return f" (did you mean {names[near[0]]!r}?)" if near else ""


class CotrainError(Exception):
    """Base of all errors of this package.

    Names from files come into messages: what a terminal would obey is shown as escapes.
    """

    def __str__(self) -> str:
        return printable(super().__str__())


class OptionError(CotrainError, ValueError):
    """An option is unknown or has a bad value."""


class CaptureError(CotrainError, RuntimeError):
    """The step cannot be captured as one graph."""


class DistributeError(CotrainError, RuntimeError):
    """A model cannot be trained by several ranks in the way it was asked for."""


class RanksApart(DistributeError):
    """Ranks that train together are not at the same point; every one of them raises this."""


class ExchangeFailed(DistributeError):
    """Ranks could not exchange something: one of them has failed or died, or takes too long."""


class ExtractError(CotrainError, RuntimeError):
    """The captured graph holds something whose memory effects are unknown."""


class PlacementError(CotrainError, RuntimeError):
    """No placement fits the budgets; `shortfall_bytes` is how much is missing on `tier`."""

    def __init__(self, message: str, *, shortfall_bytes: int, tier: Tier = Tier.DEVICE) -> None:
        super().__init__(message)
        self.shortfall_bytes = shortfall_bytes
        self.tier = tier


class PlanError(CotrainError, ValueError):
    """A plan contradicts its step, or was made for another one."""


class FormatError(CotrainError, ValueError):
    """A file is not what it should be: truncated, corrupted, or of another version."""


class LoweringError(CotrainError, RuntimeError):
    """Inductor cannot compile a segment, or it would read what the trace is wrong about.

    `segment` is its name.
    """

    def __init__(self, message: str, *, segment: str) -> None:
        super().__init__(message)
        self.segment = segment


class OutOfDeviceMemory(CotrainError, RuntimeError):
    """The step needed more memory than its budget while it ran; `tier` says where."""

    def __init__(self, message: str, *, tier: str) -> None:
        super().__init__(message)
        self.tier = tier


class StepFailed(CotrainError, RuntimeError):
    """A running step failed; the message says whether parameters are still consistent."""


class VerifyError(CotrainError, RuntimeError):
    """A verified step is not what the captured one is: the first tensor that differs, or a race."""


class DiskError(CotrainError, RuntimeError):
    """What rests on disk can have no file there, or cannot be read or written."""


class HostMemoryError(CotrainError, RuntimeError):
    """This computer does not have the host memory that a plan needs, or cannot pin it."""

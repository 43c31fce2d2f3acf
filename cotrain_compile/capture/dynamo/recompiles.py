"""What has a step compiled again and again: the value that every earlier trace was made for.

In: Dynamo's reasons why no graph that it has fits a call, one for each graph. Out: a sentence with
the user's line and the way on, where most of them are about one value, such as a list that grows.

Private torch API used: `convert_frame.get_and_maybe_log_recompilation_reasons` and the form of
what it returns. Reason: only the guards of a graph know why it does not fit. Tried on torch 2.13.0;
where a torch has no such function, or says it otherwise, nothing is said.
"""

from __future__ import annotations

import functools
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from torch._dynamo import convert_frame

from cotrain_compile.capture.dynamo.session import Session

Patch = tuple[Any, str, Any]

_ASK = "get_and_maybe_log_recompilation_reasons"
# So many graphs that one value has made useless: a batch size or a mode has fewer.
_MANY = 4

# `0/1: len(G['losses']) == 1    # losses.append(loss)  # train.py:14 in step`
_REASON = re.compile(r"\d+/\d+: (?:not (\S+)|(.+?) == .*?)\s+# (.*?)\s+# ")
_VARIABLE = re.compile(r"\b[GL]\['(\w+)'\]")
_INSIDE = re.compile(r"\w+\((.+)\)")


def reasons_noted(session: Session) -> Iterator[Patch]:
    """What is replaced so that `session` learns why the step is compiled again."""
    original = getattr(convert_frame, _ASK, None)
    if original is not None:
        yield convert_frame, _ASK, _noted(session, original)


def _noted(session: Session, original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def ask(*args: Any, **kwargs: Any) -> Any:
        reasons = original(*args, **kwargs)
        session.changing = what_changes(reasons)
        return reasons

    return ask


def what_changes(reasons: Iterable[str]) -> str | None:
    """A sentence about the value that has made many graphs useless, and what to do; or None."""
    found = [match for reason in reasons if (match := _REASON.match(reason))]
    counts = Counter((_value(match), match[3]) for match in found)
    (value, line), count = max(counts.items(), key=lambda item: item[1], default=(("", ""), 0))
    if count < _MANY:
        return None
    return (
        f"`{value}` changes from call to call, and every graph of the step has it as a constant: "
        f"`{line}`. Change it outside the step, and pass in what the step needs of it, as a tensor "
        "or as a number that is an argument; what a step appends to a list it can return"
    )


def _value(match: re.Match[str]) -> str:
    """The value that a guard is about, as the user writes it: `losses`."""
    guarded = match[1] or match[2]
    inside = _INSIDE.fullmatch(guarded)
    return _VARIABLE.sub(r"\1", inside[1] if inside else guarded)

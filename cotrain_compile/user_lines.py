"""User lines: which line an op of a graph comes from.

In: the stack that Dynamo keeps with each node. Out: one line, that of no installed package; or the
innermost that is not torch's, which may be a library's model.
"""

from __future__ import annotations

import os
import re
import sysconfig
from functools import lru_cache
from types import CodeType

# What a trace runs in place of a user's call; the demo is a user of the rest.
_HERE = os.path.dirname(os.path.abspath(__file__))
_OURS = tuple(os.path.join(_HERE, folder) + os.sep for folder in ("capture", "distribute"))
INSTALLED = tuple({sysconfig.get_path("purelib"), sysconfig.get_path("platlib")})
_LIBRARIES = (*INSTALLED, *_OURS)
_TORCH = tuple(os.path.join(folder, "torch") + os.sep for folder in INSTALLED)
_STANDARD_LIBRARY = sysconfig.get_path("stdlib")
# How Python prints a frame of a stack, with the line of code below it.
_FRAME = re.compile(r'File "(.+)", line (\d+), in (.+)\n\s*(.*)')


def user_line(stack: str | None) -> str | None:
    """The user's innermost line in `stack`, as `file:line in function: source`; None without."""
    mine = [frame for frame in _FRAME.findall(stack or "") if not in_library(frame[0])]
    if not mine:
        return None
    file, line, function, source = mine[-1]
    return f"{file}:{line} in {function}: `{source.strip()}`"


@lru_cache(maxsize=4096)  # a line makes many ops
def calling_line(stack: str | None) -> str:
    """The innermost line of `stack` that is not in torch or here, as `model.py:57`; "" without."""
    callers = [(file, line) for file, line, *_ in _FRAME.findall(stack or "") if not _torch(file)]
    return f"{os.path.basename(callers[-1][0])}:{callers[-1][1]}" if callers else ""


def _torch(filename: str) -> bool:
    return os.path.abspath(filename).startswith((*_OURS, *_TORCH))


def first_line(code: CodeType) -> str:
    """Where a compiled function begins; of one of torch's own, what it stands for."""
    if _torch(code.co_filename):
        return "the model that was given to torch.compile"
    return f"{code.co_filename}:{code.co_firstlineno} in {code.co_name}"


def in_library(filename: str) -> bool:
    """Whether a file is an installed package's, ours or Python's own, and not the user's."""
    path = os.path.abspath(filename)
    return path.startswith(_LIBRARIES) or path.startswith(_STANDARD_LIBRARY)

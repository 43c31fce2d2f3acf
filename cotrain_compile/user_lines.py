"""User lines: which line of the user's script an op of a graph comes from.

In: the stack that Dynamo keeps with each node. Out: one line, that of no installed package.
"""

from __future__ import annotations

import os
import re
import sysconfig

# What a trace runs in place of a user's call; the demo is a user of the rest.
_HERE = os.path.dirname(os.path.abspath(__file__))
_OURS = tuple(os.path.join(_HERE, folder) + os.sep for folder in ("capture", "distribute"))
INSTALLED = tuple({sysconfig.get_path("purelib"), sysconfig.get_path("platlib")})
_LIBRARIES = (*INSTALLED, *_OURS)
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


def in_library(filename: str) -> bool:
    """Whether a file is an installed package's, ours or Python's own, and not the user's."""
    path = os.path.abspath(filename)
    return path.startswith(_LIBRARIES) or path.startswith(_STANDARD_LIBRARY)

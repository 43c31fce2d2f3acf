"""User lines: which line an op of a graph comes from.

In: the stack that Dynamo keeps with each node. Out: one line, that of no installed package; or the
innermost that is not torch's, which may be a library's model.
"""

from __future__ import annotations

import importlib.util
import os
import re
import site
import sys
import sysconfig
from functools import lru_cache
from types import CodeType

# What a trace runs in place of a user's call; the demo is a user of the rest.
_HERE = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
_OURS = tuple(os.path.join(_HERE, folder) + os.sep for folder in ("capture", "distribute"))
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
    return os.path.abspath(filename).startswith((*_OURS, *_torch_folders()))


@lru_cache(1)
def _torch_folders() -> tuple[str, ...]:
    """Where torch lies, which need not be where the interpreter installs packages."""
    spec = importlib.util.find_spec("torch")
    places = (spec and spec.submodule_search_locations) or ()
    return tuple(os.path.abspath(place) + os.sep for place in places)


def first_line(code: CodeType) -> str:
    """Where a compiled function begins; of one of torch's own, what it stands for."""
    if _torch(code.co_filename):
        return "the model that was given to torch.compile"
    return f"{code.co_filename}:{code.co_firstlineno} in {code.co_name}"


def in_library(filename: str) -> bool:
    """Whether a file is an installed package's, ours or Python's own, and not the user's."""
    return _torch(filename) or os.path.abspath(filename).startswith(
        (*_installed(tuple(sys.path)), _STANDARD_LIBRARY)
    )


def in_package(filename: str) -> str | None:
    """The file of an installed package, as `package/file`; None for any other."""
    path = os.path.abspath(filename)
    above_torch = [os.path.dirname(folder.rstrip(os.sep)) + os.sep for folder in _torch_folders()]
    folders = (*_installed(tuple(sys.path)), *(above_torch if _torch(filename) else ()))
    return next((os.path.relpath(path, f) for f in folders if path.startswith(f)), None)


@lru_cache(8)
def _installed(search_path: tuple[str, ...]) -> tuple[str, ...]:
    """The folders of installed packages: the interpreter's, the user's, and any others searched.

    Others are those of a virtual environment over another, of `pip install --target`, or that a
    `.pth` names: pip leaves a `.dist-info` for each package. Where scripts are run is none.
    """
    known = {sysconfig.get_path("purelib"), sysconfig.get_path("platlib")}
    known |= {*site.getsitepackages(), site.getusersitepackages()}
    others = {os.path.abspath(folder) for folder in search_path if folder}
    others -= {os.getcwd(), os.path.abspath(os.path.dirname(sys.argv[0]))}
    known |= {folder for folder in others if _has_packages(folder)}
    return tuple(sorted((os.path.abspath(f) + os.sep for f in known), key=len, reverse=True))


def _has_packages(folder: str) -> bool:
    try:
        return any(entry.endswith(".dist-info") for entry in os.listdir(folder))
    except OSError:
        return False

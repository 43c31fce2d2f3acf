"""What stands for an absent card, compiled once for all processes of the tests that trace for one.

The product's own cache is off in tests, as it would hide what finds a plan.
"""

from __future__ import annotations

import shutil
from functools import partial
from pathlib import Path

from cotrain_compile.capture.offline import absent_card
from tests.fake_cuda.library import built, compiler

_compile_anew = absent_card._compile


def compile_once() -> None:
    """In this process and its copies the library is a copy of the one that is built already."""

    def hand_out(name: str, made: Path) -> None:
        shutil.copy(library(), made)

    absent_card._compile = hand_out


def library() -> Path:
    """The library as the compiler of this machine makes it."""
    name = compiler()
    assert name is not None
    told = [absent_card.SOURCE.read_text(), absent_card.HEADER.read_text(), *absent_card.FLAGS]
    return built("absent_card.so", told, partial(_compile, name))


def _compile(name: str, target: Path) -> None:
    aside = target.with_suffix(".tmp")
    _compile_anew(name, aside)
    aside.replace(target)

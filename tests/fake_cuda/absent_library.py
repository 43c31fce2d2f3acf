"""What stands for an absent card, compiled once for all processes of the tests that trace for one.

The product's own cache is off in tests, as it would hide what finds a plan.
"""

from __future__ import annotations

import shutil
from pathlib import Path

from cotrain_compile.capture.offline import absent_card
from tests.fake_cuda.library import built


def compile_once() -> None:
    """In this process and its copies the library is a copy of the one that is built already."""
    compile_anew = absent_card._compile
    told = [absent_card.SOURCE.read_text(), absent_card.HEADER.read_text(), *absent_card.FLAGS]

    def hand_out(name: str, made: Path) -> None:
        def build(target: Path) -> None:
            aside = target.with_suffix(".tmp")
            compile_anew(name, aside)
            aside.replace(target)

        shutil.copy(built("absent_card.so", told, build), made)

    absent_card._compile = hand_out

"""Names of torch that importing the package needs, checked once on each torch that it may meet.

An import that one torch lacks is an error of every program there, and tests on another torch do not
see it: so each name must stand in the list of each torch. A new name is checked by running this
file with `--update-golden` under that torch, and `PYTHONPATH` set to this checkout.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from tests.support.torch_names import exists, names_asked

LISTS = Path(__file__).parents[2] / "golden" / "torch_names"
HERE = torch.__version__.partition("+")[0]


def test_the_torch_at_hand_has_all_names(golden: Callable[[str, str], None]) -> None:
    asked = sorted(names_asked())
    assert [name for name in asked if not exists(name)] == []
    if (LISTS / f"{HERE}.txt").exists():
        golden(f"torch_names/{HERE}.txt", "".join(f"{name}\n" for name in asked))


@pytest.mark.parametrize("version", sorted(path.stem for path in LISTS.glob("*.txt")))
def test_each_torch_has_been_asked_for_all_names(version: str) -> None:
    known = (LISTS / f"{version}.txt").read_text(encoding="utf-8").splitlines()
    assert names_asked() <= set(known), f"run this file with --update-golden on torch {version}"


def test_a_name_that_no_torch_has_is_seen() -> None:
    assert exists("torch.ops.aten.copy_.default")
    assert not exists("torch._dynamo.no_such_module")
    assert not exists("torch.ops.aten.no_such_op.default")

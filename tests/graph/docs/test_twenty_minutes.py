"""The page that follows a step through the program prints what the program prints."""

from __future__ import annotations

import contextlib
import io
import re
from typing import Any

import pytest
import torch

from tests.conftest import compare_golden, update_golden
from tests.support.pages import ROOT

PAGE = ROOT / "docs" / "twenty-minutes.md"
# A block of Python with its output right behind it.
SHOWN = re.compile(r"```python\n(.*?)```\n\n```text\n(.*?)```", re.DOTALL)

pytestmark = pytest.mark.skipif(
    not torch.__version__.startswith("2.13."), reason="the page shows a trace of torch 2.13"
)


def test_every_output_on_the_page_is_printed_by_the_code_above_it(
    request: pytest.FixtureRequest,
) -> None:
    names: dict[str, Any] = {}

    def printed(shown: re.Match[str]) -> str:
        output = io.StringIO()
        with contextlib.redirect_stdout(output):
            exec(compile(shown[1], str(PAGE), "exec"), names)
        lines = [line.rstrip() for line in output.getvalue().splitlines()]
        return f"```python\n{shown[1]}```\n\n```text\n{chr(10).join(lines)}\n```"

    text, count = SHOWN.subn(printed, PAGE.read_text(encoding="utf-8"))
    assert count == 7
    if request.config.getoption("--update-golden"):
        update_golden(PAGE, text)
    compare_golden(PAGE, text)

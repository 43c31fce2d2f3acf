"""What is left out and what is given as its default are one; a job that ends is told."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path

import pytest

import cotrain_compile
from cotrain_compile.errors import OptionError
from cotrain_compile.jobs import load_job
from cotrain_compile.options import Options


@pytest.mark.parametrize("name", [item.name for item in fields(Options)])
def test_every_option_accepts_its_default(name: str) -> None:
    assert Options.parse({name: getattr(Options(), name)}) == Options()


def test_all_public_names_are_listed() -> None:
    assert set(cotrain_compile.__all__) <= set(dir(cotrain_compile))


@pytest.mark.parametrize(
    "source", ["import sys\nsys.exit(7)\n", "import sys\ndef job():\n    sys.exit(7)\n"]
)
def test_a_job_that_ends_the_process_is_told(tmp_path: Path, source: str) -> None:
    file = tmp_path / "ending_job.py"
    file.write_text(source)
    with pytest.raises(OptionError, match=r"ending_job.py:\d calls sys.exit\(7\)"):
        load_job(f"{file}:job")()

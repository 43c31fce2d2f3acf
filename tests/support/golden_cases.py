"""Golden cases: files that hold an input and what the program makes of it.

    # What it shows, in a sentence.

    === step
    ...
    === insert_waits
    ...

All sections but the last are the input, written by hand; the last is the output, and written by
`pytest --update-golden`. The folder of a case says which stop it is for.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

CASES = Path(__file__).parents[1] / "golden" / "cases"
_MARK = "=== "


@dataclass(frozen=True)
class Case:
    """One file: its `story`, its input by section, and what it is for, the name of the `stop`."""

    path: Path
    story: str
    sections: Mapping[str, str]

    @property
    def stop(self) -> str:
        return self.path.parent.name

    def with_output(self, output: str) -> str:
        """The text of the file with this output."""
        parts = {**self.sections, self.stop: output}
        body = "\n\n".join(f"{_MARK}{name}\n{text.strip(chr(10))}" for name, text in parts.items())
        return f"{self.story}\n\n{body}\n"


def read(path: Path) -> Case:
    """The case in a file, without its output."""
    story, *parts = path.read_text(encoding="utf-8").split(f"\n{_MARK}")
    sections = {name: text for name, _, text in (part.partition("\n") for part in parts)}
    sections.pop(path.parent.name, None)
    return Case(path, story.strip(), sections)


def cases(*stops: str) -> list[Path]:
    """The files of these stops."""
    return [path for stop in stops for path in sorted((CASES / stop).glob("*.txt"))]


def changed(before: Sequence[str], after: Sequence[str]) -> str:
    """Both as one text: what stays is indented, what goes begins with -, what comes with +."""
    if list(before) == list(after):
        return "nothing changes"
    diff = difflib.unified_diff(before, after, n=1 + len(before), lineterm="")
    return "\n".join(f"{line[:1]} {line[1:]}".rstrip() for line in list(diff)[3:])

"""Blocks of code on the pages of the documentation."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]


def blocks(page: Path, language: str) -> list[str]:
    """What is fenced as `language`, in the order of the page."""
    return [code for name, code in _fenced(page) if name == language]


def programs(page: Path) -> list[str]:
    """What is Python on `page`, and what a diff of it leaves, in the order of the page."""
    return [after(c) if n == "diff" else c for n, c in _fenced(page) if n in ("python", "diff")]


def commands(page: Path) -> list[str]:
    """Blocks that a shell reads: of Bash, or without a language where they call this package."""
    return [
        code
        for name, code in _fenced(page)
        if name == "bash" or (not name and re.search(r"^(cotrain-compile|torchrun) ", code, re.M))
    ]


def _fenced(page: Path) -> list[tuple[str, str]]:
    text = page.read_text(encoding="utf-8")
    return re.findall(r"^```(\w*)\n(.*?)^```$", text, flags=re.MULTILINE | re.DOTALL)


def after(diff: str) -> str:
    """What a diff leaves."""
    lines = [line for line in diff.splitlines() if not line.startswith("-")]
    return "\n".join(line[1:] for line in lines) + "\n"

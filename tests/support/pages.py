"""Blocks of code on the pages of the documentation."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]


def blocks(page: Path, language: str) -> list[str]:
    """What is fenced as `language`, in the order of the page."""
    text = page.read_text(encoding="utf-8")
    fenced = re.findall(r"^```(\w*)\n(.*?)^```$", text, flags=re.MULTILINE | re.DOTALL)
    return [code for name, code in fenced if name == language]


def after(diff: str) -> str:
    """What a diff leaves."""
    lines = [line for line in diff.splitlines() if not line.startswith("-")]
    return "\n".join(line[1:] for line in lines) + "\n"

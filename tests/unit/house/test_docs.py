"""The documentation names what is there: modules, options, errors, links."""

from __future__ import annotations

import re
from dataclasses import fields
from pathlib import Path

import pytest

from cotrain_compile import errors
from cotrain_compile.options import Options

ROOT = Path(__file__).parents[3]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]


def read(name: str) -> str:
    return (ROOT / name).read_text(encoding="utf-8")


def test_every_stop_of_the_architecture_is_in_the_tree() -> None:
    rows = [row for row in read("docs/architecture.md").splitlines() if row.startswith("| ")]
    named = {name for row in rows for name in re.findall(r"`([\w/]+(?:\.py|/))`", row)}
    assert len(named) > 20
    folders = [ROOT, ROOT / "cotrain_compile", ROOT / "cotrain_compile" / "runtime"]
    assert [n for n in sorted(named) if not any((f / n).exists() for f in folders)] == []


def test_every_option_is_documented_with_its_default() -> None:
    rows = re.findall(r"^\| `(\w+)` \| (.+?) \|", read("docs/options.md"), flags=re.MULTILINE)
    documented = dict(rows)
    for option in fields(Options):
        assert option.name in documented
        if option.default is not None:
            assert str(option.default) in documented[option.name]


def test_every_error_is_documented() -> None:
    page = read("docs/api.md")
    kinds = [v for v in vars(errors).values() if isinstance(v, type)]
    classes = [kind.__name__ for kind in kinds if issubclass(kind, Exception)]
    assert [name for name in classes if f"`{name}`" not in page and f".{name}`" not in page] == []


def test_each_term_of_the_glossary_has_one_meaning() -> None:
    rows = re.findall(r"^\| (.+?) \|", read("docs/glossary.md"), flags=re.MULTILINE)
    terms = [term for row in rows[1:] for term in row.split(", ")]
    assert len(terms) > 50
    assert sorted(terms) == sorted(set(terms))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#]*)(?:#[^)]*)?\)", page.read_text(encoding="utf-8")):
        if target and "://" not in target:
            assert (page.parent / target).exists(), target

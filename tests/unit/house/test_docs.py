"""The documentation names what is there: modules, options, errors, links."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Literal, get_args, get_origin

import pytest

from cotrain_compile import errors
from cotrain_compile.options import TABLE
from cotrain_compile.passes import PASSES

ROOT = Path(__file__).parents[3]
FOLDERS = ("backends", "bench", "cotrain_compile", "docs", "passes", "tests", ".github")
# Results of runs on hardware that somebody else has: the page says how to make them.
MADE_BY_THE_READER = {"bench/results/gpu_suite.json"}
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]


def read(name: str) -> str:
    return (ROOT / name).read_text(encoding="utf-8")


def test_every_stop_of_the_architecture_is_in_the_tree() -> None:
    rows = [row for row in read("docs/architecture.md").splitlines() if row.startswith("| ")]
    named = {name for row in rows for name in re.findall(r"`([\w/]+(?:\.py|/))`", row)}
    assert len(named) > 20
    folders = [ROOT, ROOT / "cotrain_compile", ROOT / "cotrain_compile" / "runtime"]
    assert [n for n in sorted(named) if not any((f / n).exists() for f in folders)] == []


@pytest.mark.parametrize(
    "name",
    [
        *("README.md", "CONTRIBUTING.md", "SECURITY.md"),
        *("bench/reliability/page.py", "bench/reliability/found.py"),
        *(str(page.relative_to(ROOT)) for page in sorted((ROOT / "docs").rglob("*.md"))),
    ],
)
def test_every_path_that_a_page_names_is_there(name: str) -> None:
    folders = "|".join(map(re.escape, FOLDERS))
    # A name may have a star; what ends in `_` or `-` goes on with one.
    found = re.findall(rf"(?<![\w/.-])(?:{folders})/[\w./*-]*[\w/*]", read(name))
    paths = set(found) - MADE_BY_THE_READER
    assert [path for path in sorted(paths) if not any(ROOT.glob(path))] == []


def test_the_documentation_stays_short_enough_to_be_read() -> None:
    """Words are tokens with a letter: bars and numbers of tables are none."""
    words = sum(
        any(map(str.isalpha, token))
        for page in PAGES
        for token in page.read_text(encoding="utf-8").split()
    )
    assert words <= 45_000


def test_every_list_of_passes_is_whole_and_in_order() -> None:
    """A paragraph that names more than half of them is a list."""
    names = [rewrite.__name__ for rewrite in PASSES]
    lists = []
    for page in [ROOT / "CONTRIBUTING.md", *PAGES]:
        for paragraph in re.split(r"\n\s*\n|\n(?=\d+\.|[-|])", page.read_text(encoding="utf-8")):
            named = re.findall(rf"`(?:passes/)?({'|'.join(names)})(?:\.py)?`", paragraph)
            if len(set(named)) > len(names) // 2:
                lists.append((page.name, named))
    assert lists
    assert [found for found in lists if found[1] != names] == []


def test_every_option_is_documented_with_its_default() -> None:
    table = read("docs/options.md").partition("| option |")[2].partition("\n\n")[0]
    documented = dict(re.findall(r"^\| `(\w+)` \| (.+?) \|", table, flags=re.MULTILINE))
    assert sorted(documented) == sorted(TABLE)
    for option in TABLE.values():
        if option.default is not None:
            assert str(option.default) in documented[option.name]


def test_every_choice_of_an_option_is_documented() -> None:
    """What is a choice in the table of options is the same list on the page, and no other is."""
    rows = re.findall(
        r'^\| `(\w+)` \| .+? \| ((?:`"[\w-]+"`(?:, )?)+) \|', read("docs/options.md"), re.MULTILINE
    )
    documented = {name: tuple(re.findall(r'"([\w-]+)"', listed)) for name, listed in rows}
    choices = {o.name: get_args(o.given) for o in TABLE.values() if get_origin(o.given) is Literal}
    assert documented == choices


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

"""What the site has beside the pages of this folder, and how links to it are written there.

README, changelog and the like lie at the top of the repository, and results in `bench/results`.
They become pages and files of the site, as does what Typer tells of the command line; each decision
gets its place in the navigation.
"""

from __future__ import annotations

import posixpath
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parents[1]
TOP = {
    "README.md": "index.md",
    "CHANGELOG.md": "changelog.md",
    "CONTRIBUTING.md": "contributing.md",
    "SECURITY.md": "security.md",
}
RELATIVE_LINK = re.compile(r"\]\(([\w./-]+\.\w+)(#[\w-]*)?\)")


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Every decision is in the navigation."""
    decisions = sorted((ROOT / "docs" / "decisions").glob("*.md"))
    assert config.nav is not None
    config.nav.append({"Decisions": [f"decisions/{path.name}" for path in decisions]})
    return config


def on_files(files: Files, *, config: MkDocsConfig) -> Files:
    """Pages from the top of the repository, the command line, and the results pages link to."""
    for source, page in TOP.items():
        text = (ROOT / source).read_text(encoding="utf-8")
        files.append(File.generated(config, page, content=text))
    files.append(File.generated(config, "reference/cli.md", content=_command_line()))
    for path in sorted((ROOT / "bench" / "results").glob("*.json")):
        name = f"bench/results/{path.name}"
        files.append(File.generated(config, name, abs_src_path=str(path)))
    return files


def on_page_markdown(markdown: str, *, page: Page, **_: Any) -> str:
    """Links lead from the page's place on the site to that of their target."""
    here = page.file.src_uri
    in_repository = "" if here in TOP.values() else f"docs/{posixpath.dirname(here)}"

    def on_site(link: re.Match[str]) -> str:
        path = posixpath.normpath(posixpath.join(in_repository, link[1]))
        target = TOP.get(path, path.removeprefix("docs/"))
        return f"]({posixpath.relpath(target, posixpath.dirname(here) or '.')}{link[2] or ''})"

    return RELATIVE_LINK.sub(on_site, markdown)


def _command_line() -> str:
    """The reference of all commands, by Typer's own command."""
    typer = [sys.executable, "-m", "typer", "cotrain_compile.cli.main", "utils", "docs"]
    told = subprocess.run(
        [*typer, "--name", "cotrain-compile", "--title", "Command line"],
        cwd=ROOT,
        check=True,
        text=True,
        capture_output=True,
    )
    return told.stdout

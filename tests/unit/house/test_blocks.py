"""What the documentation tells a reader to type can be typed: Python, imports, commands."""

from __future__ import annotations

import ast
import shlex
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path

import pytest
import typer
from typer.core import TyperGroup

from cotrain_compile.cli.main import app
from tests.support.pages import PAGES, ROOT, blocks, programs

COMMANDS = typer.main.get_command(app)


def commands(page: Path) -> Iterator[list[str]]:
    """The words of each call of the command line in a block without a language, or of Bash."""
    for block in (*blocks(page, ""), *blocks(page, "bash")):
        for line in block.splitlines():
            words = shlex.split(line, comments=True) if "cotrain-compile " in line else []
            if "cotrain-compile" in words:
                yield words[words.index("cotrain-compile") + 1 :]


def name_of(page: Path) -> str:
    """As pytest shows it."""
    return str(page.relative_to(ROOT))


@pytest.mark.parametrize("page", [page for page in PAGES if programs(page)], ids=name_of)
def test_blocks_are_python_and_import_what_is_there(page: Path) -> None:
    for program in programs(page):
        for node in ast.walk(ast.parse(program, str(page))):
            module = node.module if isinstance(node, ast.ImportFrom) else None
            if module and module.startswith("cotrain_compile"):
                assert isinstance(node, ast.ImportFrom)
                for name in node.names:
                    assert hasattr(import_module(module), name.name), f"{module}.{name.name}"


@pytest.mark.parametrize("page", [page for page in PAGES if any(commands(page))], ids=name_of)
def test_commands_have_the_options_that_pages_give_them(page: Path) -> None:
    assert isinstance(COMMANDS, TyperGroup)
    for name, *words in commands(page):
        COMMANDS.commands[name].make_context(name, words)

"""Option list: what `options={...}` may hold, as a table or as a JSON schema."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rich.table import Table

from cotrain_compile.cli.terminal import Json, console, keep_stdout_for, print_json
from cotrain_compile.options.keywords import options_schema


def options(as_json: Json = False) -> None:
    """List the options of a compiled step; with --json as a JSON schema, for an editor."""
    keep_stdout_for(as_json)
    schema = options_schema()
    if as_json:
        print_json(schema)
        return
    table = Table("option", "may be", "default", "what it is for", box=None, pad_edge=False)
    for name, told in schema["properties"].items():
        default = told["default"]
        shown = "" if default in (None, []) else str(default)
        table.add_row(name, _may_be(told), shown, told["description"])
    console.print(table, soft_wrap=False)
    console.print("The documentation's page Options says more of each.")


def _may_be(told: Mapping[str, Any]) -> str:
    """The choices of an option, or its types."""
    if "enum" in told:
        return ", ".join(told["enum"])
    types = [_may_be(one) for one in told.get("anyOf", ())] or [
        "path" if told.get("format") == "path" else str(told.get("const", told.get("type", "")))
    ]
    return " or ".join(dict.fromkeys(types))

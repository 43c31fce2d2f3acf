"""Terminal: where the command line writes."""

from __future__ import annotations

from rich.console import Console

# Lines are left for the terminal to wrap, so that a log can be searched.
console = Console(markup=False, highlight=False, soft_wrap=True)

"""Terminal: consoles on which a text from a file or a model is only ever text."""

from __future__ import annotations

from typing import Any

from rich.console import Console
from rich.text import Text

from cotrain_compile.support.units import printable


class PlainConsole(Console):
    """No markup, no highlighting; the terminal wraps lines, so that a log can be searched.

    Control characters in a text, which a terminal would obey, are shown as escapes.
    """

    def __init__(self, **settings: Any) -> None:
        super().__init__(markup=False, highlight=False, soft_wrap=True, **settings)

    def render_str(self, text: str, **settings: Any) -> Text:
        return super().render_str(printable(text), **settings)

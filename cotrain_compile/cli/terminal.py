"""Terminal: where the command line writes."""

from __future__ import annotations

from cotrain_compile.viz.text.terminal import PlainConsole

console = PlainConsole()

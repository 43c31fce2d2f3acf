"""Terminal: where the command line writes."""

from __future__ import annotations

from cotrain_compile.viz.terminal import PlainConsole

console = PlainConsole()

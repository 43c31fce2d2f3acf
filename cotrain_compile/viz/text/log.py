"""Log: what is said while a step is compiled goes through Python's `logging`, as a library's does.

The logger is `cotrain_compile`, its level INFO unless somebody has set another. Its handler writes
records on stderr as they are, above the bars of tqdm, unless `TORCH_LOGS` or the program has given
the logger one before; a program that wants them among its own sets `propagate = True`.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from rich.text import Text

from cotrain_compile.viz.text.terminal import PlainConsole

LOG = logging.getLogger("cotrain_compile")


def say(lines: Iterable[Text]) -> None:
    """Tell the logger `lines` as one record; on a terminal they keep their style."""
    if text := Text("\n").join(lines):
        LOG.info("%s", text)


def on_a_terminal() -> bool:
    """Whether what is said is read on a terminal, which has room for a bar."""
    return PlainConsole(stderr=True).is_terminal


@contextmanager
def above_bars() -> Iterator[None]:
    """Within it, the bars of tqdm are off the terminal; after it they are drawn again."""
    tqdm = getattr(sys.modules.get("tqdm"), "tqdm", None)
    if tqdm is None:
        yield
        return
    # Without its lock: what goes on inside may take minutes, and other threads may have bars.
    with tqdm.external_write_mode(file=sys.stderr, nolock=True):
        yield


class _OnStderr(logging.Handler):
    """Writes a record as it is; stderr is looked up anew, as a program may replace it."""

    def emit(self, record: logging.LogRecord) -> None:
        if LOG.propagate:
            return  # the program's own handlers have it
        said = record.args[0] if isinstance(record.args, tuple) and record.args else None
        with above_bars():
            PlainConsole(stderr=True).print(said if isinstance(said, Text) else self.format(record))


if not LOG.level:
    LOG.setLevel(logging.INFO)
if not LOG.handlers:
    LOG.addHandler(_OnStderr())
    LOG.propagate = False

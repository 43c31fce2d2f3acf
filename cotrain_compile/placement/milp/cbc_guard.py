"""Runs another program, and ends it with the process that started this one.

The script of a process: the program and its arguments on the command line, the status of the
program as its own. Its standard input is a pipe that nothing is written to: its end is that of the
process on the other side. It imports nothing of this package.
"""

from __future__ import annotations

import os
import subprocess
import sys
import threading


def main() -> None:
    """Run the program to its end, or to that of whoever waits for it."""
    quiet = subprocess.DEVNULL
    child = subprocess.Popen(sys.argv[1:], stdin=quiet, stdout=quiet, stderr=quiet)

    def end_with_our_parent() -> None:
        os.read(0, 1)
        child.kill()
        os._exit(1)

    threading.Thread(target=end_with_our_parent, daemon=True).start()
    os._exit(child.wait() & 0xFF)


if __name__ == "__main__":
    main()

"""Where the command line begins: the script `cotrain-compile`, and `python -m cotrain_compile`.

It loads the rest within reach of a handler: Ctrl-C is one line at any time, also before that.
"""

from __future__ import annotations

import sys


def main() -> None:
    """Run the command that is typed; on Ctrl-C exit with code 130, as shells do."""
    try:
        from cotrain_compile.cli.main import main as run

        run()
    except KeyboardInterrupt:
        print("stopped by Ctrl-C", file=sys.stderr)
        sys.exit(130)


if __name__ == "__main__":
    main()

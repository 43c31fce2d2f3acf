"""Flags: what a message calls by the names of options, called as on the command line.

`option 'memory_budget' is ...` becomes `--memory-budget is ...`, and `policy='auto'` becomes
`--policy auto`. Options that no command has as a flag keep their names.
"""

from __future__ import annotations

import re

FLAGS = (
    *("checkpoints", "device", "gap", "host_kernels", "host_memory_budget", "lowering", "machine"),
    *(
        "memory_budget",
        "micro_batch_order",
        "overlap_steps",
        "policy",
        "recompute",
        "seed",
        "split",
    ),
    *("solver", "speculate", "time_limit", "work_limit"),
)
_ANY = "|".join(FLAGS)
# A name of one word is an ordinary word, too, if nothing says that it is an option.
_UNLIKE_A_WORD = "|".join(name for name in FLAGS if "_" in name)
_FORMS = re.compile(
    rf"option '(?P<option>{_ANY})'"
    rf"|\b(?P<set>{_ANY})=(?:'(?P<text>[^']*)'|(?P<value>[\w.]+))"
    rf"|(?<![\w'-])(?P<bare>{_UNLIKE_A_WORD})\b(?!['=])"
)


def as_flags(message: str) -> str:
    """`message` in the words of somebody who has typed a command."""
    return _FORMS.sub(_flag, message)


def _flag(found: re.Match[str]) -> str:
    name = found["option"] or found["set"] or found["bare"]
    flag = f"--{name.replace('_', '-')}"
    value = found["text"] or found["value"]
    return f"{flag} {value}" if value and value != "True" else flag

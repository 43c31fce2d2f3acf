"""How many examples a law is tried on in every run; in the long mode it is many times as many."""

from __future__ import annotations

from hypothesis import settings

# What the profile "ci" has.
IN_EVERY_RUN = 40


def examples(count: int) -> settings:
    """`count` examples, and as many times more as the profile has: 50 times in the long one."""
    return settings(max_examples=count * settings().max_examples // IN_EVERY_RUN)

"""Idioms: ways in which people write training steps, each a program of its own that can be run."""

from __future__ import annotations

import functools
from importlib import import_module

from bench.idioms.registry import IDIOMS, Idiom

TOPICS = ("gradients", "parameters", "losses", "models", "optimizers", "loops", "refusals")


@functools.cache
def all_idioms() -> dict[str, Idiom]:
    """Every idiom by name, in the order in which the modules of the topics have them."""
    for topic in TOPICS:
        import_module(f"bench.idioms.{topic}")
    return dict(IDIOMS)

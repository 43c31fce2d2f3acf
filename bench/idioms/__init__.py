"""Idioms: ways in which people write training steps, each a program of its own that can be run."""

from __future__ import annotations

import functools
from importlib import import_module

from bench.idioms.registry import IDIOMS, Idiom

MODULES = (
    "gradients",
    "hooks",
    "gradient_directions",
    "parameters",
    "losses",
    "models",
    "structures",
    "images",
    "sequences",
    "optimizers",
    "written_optimizers",
    "loops",
    "second_orders",
    "several_models",
    "results",
    "refusals",
    "refused_values",
    "scripts",
)


@functools.cache
def all_idioms() -> dict[str, Idiom]:
    """Every idiom by name, in the order in which the modules have them."""
    for module in MODULES:
        import_module(f"bench.idioms.{module}")
    return dict(IDIOMS)

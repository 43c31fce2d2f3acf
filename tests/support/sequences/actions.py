"""All that a program does between and around the calls of a step: `ACTIONS`, by name.

The order is that of sequences' seeds: what is new comes last in its module, or in a new module.
"""

from __future__ import annotations

from tests.support.sequences import (
    calls,
    checkpoints,
    hooks,
    model_changes,
    optimizer_changes,
    process_settings,
    work_in_eager,
)
from tests.support.sequences.registry import Action, actions_of

ACTIONS: dict[str, Action] = actions_of(
    (
        calls,
        work_in_eager,
        optimizer_changes,
        model_changes,
        checkpoints,
        hooks,
        process_settings,
    )
)
# How often an action is drawn, beside one that has no entry.
WEIGHTS: dict[str, int] = {"call": 12, "call_other_rows": 2, "eager_step": 2}

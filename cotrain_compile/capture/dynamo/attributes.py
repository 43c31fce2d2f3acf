"""Attributes of what Dynamo traces: how each torch looks them up.

Private torch API used: `VariableTracker.var_getattr` up to torch 2.13, `.tp_getattro_impl` and
`object_protocol.generic_getattr` from 2.14 on. Reason: nothing public says what an attribute is in
the midst of a trace. Tried on torch 2.13.0, 2.14.1 and 2.15.0.
"""

from __future__ import annotations

import importlib
from typing import Any

from torch._dynamo.variables.base import VariableTracker

OLD, NEW = "var_getattr", "tp_getattro_impl"
# The method of this torch that classes of variables have for it.
LOOK_UP = NEW if hasattr(VariableTracker, NEW) else OLD


def attribute_of(variable: VariableTracker, tx: Any, name: str) -> VariableTracker:
    """What `variable.name` is at this place of the trace, with what the step has set till there."""
    found: VariableTracker
    if LOOK_UP == OLD:
        found = getattr(variable, OLD)(tx, name)
    else:
        protocol: Any = importlib.import_module("torch._dynamo.variables.object_protocol")
        found = protocol.generic_getattr(tx, variable, name)
    return found

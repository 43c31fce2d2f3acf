"""What lies around a call and is no value of the step: hooks of all modules or on saved tensors.

In: the state of the process when a step is traced or called. Out: a trace that holds as long as
hooks of all modules (`register_module_forward_hook` and its like) are those that it has seen, and a
refusal where eager would do at the call what no graph does: pack and unpack saved tensors, look for
anomalies. One guard asks for all of it.

Private torch API used: `OutputGraph.init_ambient_guards`, `GlobalStateSource`, lambda guards,
`torch._C._autograd._top_saved_tensors_default_hooks`, `torch.nn.modules.module._global_*_hooks`.
Reason: stock Dynamo guards grad mode, autocast, modes and devices, but none of these. Tried on
torch 2.13.0.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch._dynamo.guards import GuardBuilder, get_verbose_code_parts
from torch._dynamo.output_graph import OutputGraph
from torch._dynamo.source import GlobalStateSource
from torch._guards import Guard
from torch.nn.modules import module as torch_module

from cotrain_compile.capture.dynamo.ways_on import ANOMALIES, SAVED_TENSORS

Patch = tuple[Any, str, Any]

_GLOBAL_HOOKS = (
    "_global_forward_pre_hooks",
    "_global_forward_hooks",
    "_global_backward_pre_hooks",
    "_global_backward_hooks",
)


def ambient_guarded() -> Iterator[Patch]:
    """What is replaced so that a trace holds only among the hooks that it has seen."""
    yield (
        OutputGraph,
        "init_ambient_guards",
        _with_ours(OutputGraph.init_ambient_guards),
    )


def why_refused() -> str | None:
    """What is around this call that a compiled step would pass over, with the way on; or None."""
    if _packs_saved_tensors():
        return (
            "hooks on saved tensors (torch.autograd.graph.saved_tensors_hooks, save_on_cpu) are "
            f"around the call of the step, which would pass over them; {SAVED_TENSORS}"
        )
    if torch.is_anomaly_enabled():
        return (
            "torch.autograd.set_detect_anomaly(True) is on, and a compiled step has no backward of "
            f"autograd's in which to look; {ANOMALIES}"
        )
    return None


def _with_ours(original: Callable[[OutputGraph], None]) -> Callable[[OutputGraph], None]:
    @functools.wraps(original)
    def init_ambient_guards(self: OutputGraph) -> None:
        original(self)
        self.guards.add(GlobalStateSource().make_guard(_among_these_hooks))

    return init_ambient_guards


def _among_these_hooks(builder: GuardBuilder, guard: Guard) -> None:
    """Guard that a call is among the hooks of the trace, and that nothing would refuse it.

    Each registration has a key of its own, so that a hook in place of another has another one.
    """
    hooks = [getattr(torch_module, name) for name in _GLOBAL_HOOKS]
    seen = [list(registered) for registered in hooks]
    has_none = not any(seen)

    def holds(_: object) -> bool:
        if _packs_saved_tensors() or torch.is_anomaly_enabled():
            return False
        if has_none:
            return not any(hooks)
        return [list(registered) for registered in hooks] == seen

    told = ["hooks of all modules, or on saved tensors, have changed"]
    builder.guard_manager.root.add_lambda_guard(
        holds, get_verbose_code_parts(told, guard), guard.user_stack
    )


def _packs_saved_tensors() -> bool:
    return torch._C._autograd._top_saved_tensors_default_hooks(True) is not None

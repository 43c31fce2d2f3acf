"""What lies around a call and is no value of the step: hooks of all modules, modes.

In: the state of the process when a step is traced or called. Out: a trace that holds as long as
hooks of all modules (`register_module_forward_hook` and its like) are those that it has seen, and a
refusal where eager would do at the call what no graph does: pack and unpack saved tensors, look for
anomalies, hand each op to a mode of dispatch or of functions, or raise since torch.func transforms
the step. One guard asks for all of it but modes of functions, which Dynamo's own guards compare.

With the guards on hooks of each module (`skip_nnmodule_hook_guards=False`) it costs about 0.34 ms
of processor time in a call of 3.6 ms: a step of 199 modules (33 of `Linear(4, 4)` with 4 of
`Identity`), SGD, `policy="resident"`; the median of 1542 pairs of calls with and without all of it,
taken in turn in one process on a CPU that had other work.

Private torch API used: `OutputGraph.init_ambient_guards`, `GlobalStateSource`, lambda guards,
`torch._C._autograd._top_saved_tensors_default_hooks`,
`torch._C._functorch.peek_interpreter_stack`, `torch.nn.modules.module._global_*_hooks`,
`torch.utils._python_dispatch._get_current_dispatch_mode_stack`,
`torch.overrides._get_current_function_mode_stack`, `torch.utils._device.DeviceContext`. Reason:
stock Dynamo guards grad mode, autocast, modes of functions and devices, but none of the rest. Tried
on torch 2.13.0.
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
from torch.overrides import _get_current_function_mode_stack
from torch.utils._device import DeviceContext
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from cotrain_compile.capture.dynamo.ways_on import (
    ANOMALIES,
    DISPATCH_MODES,
    FUNCTION_MODES,
    SAVED_TENSORS,
    WITHIN_A_TRANSFORM,
)

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
    if torch._C._functorch.peek_interpreter_stack() is not None:
        return (
            "the step is called within torch.func or vmap, where backward() does not run, in eager "
            f"neither; {WITHIN_A_TRANSFORM}"
        )
    if torch.is_anomaly_enabled():
        return (
            "torch.autograd.set_detect_anomaly(True) is on, and a compiled step has no backward of "
            f"autograd's in which to look; {ANOMALIES}"
        )
    if modes := _function_modes():
        return (
            f"a mode of functions ({_names(modes)}) is around the call of the step, where it would "
            f"be asked for each op of the plan, after its effect is traced; {FUNCTION_MODES}"
        )
    return None


def why_passed_over() -> str | None:
    """What is around this call under which Dynamo runs a step in eager, unasked; or None."""
    modes = _dispatch_modes()
    if not modes:
        return None
    return (
        f"a mode of dispatch ({_names(modes)}) is around the call of the step, under which torch "
        f"compiles nothing, so that no budget would hold; {DISPATCH_MODES}"
    )


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
        if _packs_saved_tensors() or torch.is_anomaly_enabled() or _dispatch_modes():
            return False
        if has_none:
            return not any(hooks)
        return [list(registered) for registered in hooks] == seen

    told = ["hooks of all modules, or what is around the call, have changed"]
    builder.guard_manager.root.add_lambda_guard(
        holds, get_verbose_code_parts(told, guard), guard.user_stack
    )


def _packs_saved_tensors() -> bool:
    return torch._C._autograd._top_saved_tensors_default_hooks(True) is not None


def _function_modes() -> list[Any]:
    """The modes of functions that are not torch's own for `with torch.device(...)`.

    No guard of ours asks for them: Dynamo's own compares the stack of these modes.
    """
    return [mode for mode in _get_current_function_mode_stack() if type(mode) is not DeviceContext]


def _names(modes: list[Any]) -> str:
    return ", ".join(dict.fromkeys(type(mode).__name__ for mode in modes))


def _dispatch_modes() -> list[Any]:
    """The modes for which Dynamo skips a frame: not torch's own, nor those that let it compile."""
    return [
        mode
        for mode in _get_current_dispatch_mode_stack()
        if not mode.is_infra_mode() and not _lets_compile(mode)
    ]


def _lets_compile(mode: Any) -> bool:
    asked = getattr(mode, "ignore_compile_internals", None)  # older torch has no such modes
    return asked is not None and bool(asked())

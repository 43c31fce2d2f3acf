"""Unread code: of a module that Dynamo makes of its graph and throws away, no Python is written.

Dynamo puts the graph into a module to add checks of sizes to it. Making one writes the graph down
as Python and compiles that, a fortieth of a trace; this one is never called.

Private torch API used: `OutputGraph.compile_and_call_fx_graph`. Reason: the module that follows is
lazy, this one is not. Tried on torch 2.13.0.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch
from torch import fx
from torch._dynamo import config
from torch._dynamo.output_graph import OutputGraph

TRIED = ("2.13.",)
_COMPILE = "compile_and_call_fx_graph"


def unread_code_unwritten() -> Iterator[tuple[Any, str, Any]]:
    """What is replaced: owner, name and what stands there instead."""
    if torch.__version__.startswith(TRIED):
        yield OutputGraph, _COMPILE, _without_code(getattr(OutputGraph, _COMPILE))


def _without_code(original: Callable[..., Any]) -> Callable[..., Any]:
    """`original`, whose first module of its graph gets no code, if it is the one for checks."""

    @functools.wraps(original)
    def compile_and_call(self: OutputGraph, *args: Any, **kwargs: Any) -> Any:
        written = fx.GraphModule.recompile
        awaited = [] if config.do_not_emit_runtime_asserts else [self.graph]

        def recompile(module: fx.GraphModule) -> Any:
            if awaited and module.graph is awaited[0]:
                awaited.clear()
                return None
            return written(module)

        with mock.patch.object(fx.GraphModule, "recompile", recompile):
            return original(self, *args, **kwargs)

    return compile_and_call

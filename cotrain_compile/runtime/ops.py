"""The ops that passes put into a graph, and the runtime that carries them out.

`offload` copies to the host, `prefetch_into` copies back over a device tensor, `wait` holds the
device until tasks are done, `host_region` runs a subgraph on the host. All but `wait` return before
the work is done. `task` names the work; `after` names tasks that must be done before it starts.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, Protocol

import torch
from torch import fx

_library = torch.library.Library("cotrain", "DEF")
_library.define("offload(Tensor source, str task, str[] after) -> Tensor")
_library.define("prefetch_into(Tensor(a!) destination, Tensor source, str task, str[] after) -> ()")
_library.define("wait(str[] tasks, Tensor[] kept) -> ()")


class Runtime(Protocol):
    """Carries out tasks: one implementation per kind of device."""

    def offload(self, source: torch.Tensor, task: str, after: Sequence[str]) -> torch.Tensor:
        """Start a copy to the host; the result is valid when `task` is done."""
        ...

    def prefetch_into(
        self, destination: torch.Tensor, source: torch.Tensor, task: str, after: Sequence[str]
    ) -> None:
        """Start a copy from the host over `destination`."""
        ...

    def run_region(
        self, region: fx.GraphModule, task: str, after: Sequence[str], inputs: Sequence[Any]
    ) -> None:
        """Start `region` on the host with `inputs`, some of which it writes."""
        ...

    def wait(self, tasks: Sequence[str]) -> None:
        """Return when `tasks` are done; raise what failed in them."""
        ...


_current: ContextVar[Runtime] = ContextVar("cotrain_runtime")


@contextmanager
def running_on(runtime: Runtime) -> Iterator[None]:
    """Within it, this package's ops are carried out by `runtime`."""
    token = _current.set(runtime)
    try:
        yield
    finally:
        _current.reset(token)


def host_region(
    region: fx.GraphModule, task: str, after: Sequence[str], inputs: Sequence[Any]
) -> None:
    """Graph node: the update of one parameter, on the host."""
    _current.get().run_region(region, task, after, inputs)


def _offload(source: torch.Tensor, task: str, after: Sequence[str]) -> torch.Tensor:
    return _current.get().offload(source, task, after)


def _prefetch_into(
    destination: torch.Tensor, source: torch.Tensor, task: str, after: Sequence[str]
) -> None:
    _current.get().prefetch_into(destination, source, task, after)


def _wait(tasks: Sequence[str], kept: Sequence[torch.Tensor]) -> None:
    _current.get().wait(tasks)


_library.impl("offload", _offload, "CompositeExplicitAutograd")
_library.impl("prefetch_into", _prefetch_into, "CompositeExplicitAutograd")
_library.impl("wait", _wait, "CompositeExplicitAutograd")


class _Ops:
    """The registered overloads, as targets of graph nodes."""

    offload = torch.ops.cotrain.offload.default
    prefetch_into = torch.ops.cotrain.prefetch_into.default
    wait = torch.ops.cotrain.wait.default


cotrain = _Ops

# They are called for their effect: dead-code elimination must leave them alone.
for _target in (cotrain.offload, cotrain.prefetch_into, cotrain.wait, host_region):
    fx.node.has_side_effect(_target)

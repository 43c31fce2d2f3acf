"""The ops that passes put into a graph, and the runtime that carries them out.

`offload` copies to the host and `prefetch` to the device; with `_into` over a tensor that is there,
else into a new one. `host_cast` makes a low-precision copy on the host, `host_region` runs a
subgraph there, `wait` holds the device until tasks are done. All but `wait` return before the work
is done. `task` names the work; `after` names tasks that must be done before it starts, and
`after_previous` such tasks of the step before; `wait_previous` waits for some of these. What the
step before never started counts as done.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import fx

_library = torch.library.Library("cotrain", "DEF")
_TASK = 'str task, str[] after, str[]? after_previous=None, str bundle="", int[] part=[]'
_library.define(f"offload(Tensor source, {_TASK}) -> Tensor")
_library.define(f"offload_into(Tensor(a!) destination, Tensor source, {_TASK}) -> ()")
_library.define(f"prefetch(Tensor source, {_TASK}) -> Tensor")
_library.define(f"prefetch_into(Tensor(a!) destination, Tensor source, {_TASK}) -> ()")
_library.define(f"host_cast(Tensor source, ScalarType dtype, {_TASK}) -> Tensor")
_library.define("wait(str[] tasks, Tensor[] kept) -> ()")
_library.define("wait_previous(str[] tasks) -> ()")


@dataclass(frozen=True, slots=True)
class Launch:
    """The start of `task`: when those of `after` in its step, and of the one before, are done.

    Of a copy, `alongside` says that the device has been given nothing since the copy that was
    started last, `more` that the next task is a copy in the same direction. A task that is `small`
    takes no longer than it takes to start it. `bundle` is as of a plan's task. A `part` is of what
    is on the host, all of its memory in a row: its first element and the one behind its last.
    """

    task: str
    after: Sequence[str] = ()
    after_previous: Sequence[str] = ()
    bundle: str = ""
    part: Sequence[int] = ()
    alongside: bool = False
    more: bool = False
    small: bool = False


@dataclass(frozen=True, slots=True)
class Bundle:
    """The start of several tasks as one: `launch` is that of all, `members` have their own."""

    launch: Launch
    members: Sequence[Launch]


def name_of_bundle(members: Sequence[Launch]) -> str:
    """What the task is called that carries out all `members`."""
    return f"{members[0].task} and {len(members) - 1} more"


class Runtime(Protocol):
    """Carries out tasks: one implementation per kind of device."""

    def offload(self, source: torch.Tensor, launch: Launch) -> torch.Tensor:
        """Start a copy to the host; the result is valid when the task is done."""
        ...

    def offload_into(self, destination: torch.Tensor, source: torch.Tensor, launch: Launch) -> None:
        """Start a copy from the device over `destination` on the host."""
        ...

    def prefetch(self, source: torch.Tensor, launch: Launch) -> torch.Tensor:
        """Start a copy to the device; the result is valid when the task is done."""
        ...

    def prefetch_into(
        self, destination: torch.Tensor, source: torch.Tensor, launch: Launch
    ) -> None:
        """Start a copy from the host over `destination` on the device."""
        ...

    def host_cast(self, source: torch.Tensor, dtype: torch.dtype, launch: Launch) -> torch.Tensor:
        """Start to make a copy of `source` in another precision, both on the host."""
        ...

    def run_region(self, region: fx.GraphModule, inputs: Sequence[Any], launch: Launch) -> None:
        """Start `region` on the host with `inputs`, some of which it writes."""
        ...

    def copy_all(
        self, sources: Sequence[torch.Tensor], bundle: Bundle, *, down: bool
    ) -> list[torch.Tensor]:
        """As `offload`, or where it is not `down` `prefetch`, of all `sources` in one task."""
        ...

    def copy_all_into(
        self,
        destinations: Sequence[torch.Tensor],
        sources: Sequence[torch.Tensor],
        bundle: Bundle,
        *,
        down: bool,
    ) -> None:
        """As `offload_into`, or where it is not `down` `prefetch_into`, of all in one task."""
        ...

    def run_regions(
        self,
        regions: Sequence[fx.GraphModule],
        inputs: Sequence[Sequence[Any]],
        bundle: Bundle,
    ) -> None:
        """As `run_region`, of all `regions` in one task."""
        ...

    def wait(self, tasks: Sequence[str]) -> None:
        """Return when `tasks` are done; raise what failed in them."""
        ...

    def wait_previous(self, tasks: Sequence[str]) -> None:
        """As `wait`, for tasks of the step before; those it never started are done."""
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
    region: fx.GraphModule,
    task: str,
    after: Sequence[str],
    inputs: Sequence[Any],
    after_previous: Sequence[str] = (),
    bundle: str = "",
) -> None:
    """Graph node: the update of one parameter, on the host."""
    _current.get().run_region(region, inputs, Launch(task, after, after_previous, bundle))


def _by_the_runtime(name: str, operands: int) -> Callable[..., Any]:
    """Carries out the op `name`, whose arguments are `operands` values and then its launch."""

    def carry_out(*arguments: Any) -> Any:
        launch = Launch(*arguments[operands:])
        return getattr(_current.get(), name)(*arguments[:operands], launch)

    return carry_out


def _wait(tasks: Sequence[str], kept: Sequence[torch.Tensor]) -> None:
    _current.get().wait(tasks)


def _wait_previous(tasks: Sequence[str]) -> None:
    _current.get().wait_previous(tasks)


_OPERANDS = {"offload": 1, "offload_into": 2, "prefetch": 1, "prefetch_into": 2, "host_cast": 2}

for _name, _operands in _OPERANDS.items():
    _library.impl(_name, _by_the_runtime(_name, _operands), "CompositeExplicitAutograd")
_library.impl("wait", _wait, "CompositeExplicitAutograd")
_library.impl("wait_previous", _wait_previous, "CompositeExplicitAutograd")


def current_runtime() -> Runtime:
    """What carries out ops here; raises LookupError outside `running_on`."""
    return _current.get()


class _Ops:
    """The registered overloads, as targets of graph nodes."""

    offload = torch.ops.cotrain.offload.default
    offload_into = torch.ops.cotrain.offload_into.default
    prefetch = torch.ops.cotrain.prefetch.default
    prefetch_into = torch.ops.cotrain.prefetch_into.default
    host_cast = torch.ops.cotrain.host_cast.default
    wait = torch.ops.cotrain.wait.default
    wait_previous = torch.ops.cotrain.wait_previous.default


cotrain = _Ops

# Every target of a node that a pass adds but for views: none is an op that the device runs.
TASKS: frozenset[Any] = frozenset(
    {
        cotrain.offload,
        cotrain.offload_into,
        cotrain.prefetch,
        cotrain.prefetch_into,
        cotrain.host_cast,
        cotrain.wait,
        cotrain.wait_previous,
        host_region,
    }
)

# They are called for their effect: dead-code elimination must leave them alone.
for _target in TASKS:
    fx.node.has_side_effect(_target)

"""Task nodes: what a node says that starts a task or waits for some, as typed views.

In: a node of a placed graph. Out: the view of its kind, one of `TaskNode`; None for an op. Passes
put nodes in, and change them, by the same views, so that which argument is which is known here
alone. Readers match on the kind to the end (`assert_never`): a new kind is then an error of types
wherever somebody has to know it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from cotrain_compile.plan import Task
from cotrain_compile.runtime.ops import Launch, cotrain, host_region


@dataclass(frozen=True, slots=True)
class Offload:
    """A copy of `source` to the host: over `destination` there, or where that is None a new one."""

    source: fx.Node
    launch: Launch
    destination: fx.Node | None = None

    @classmethod
    def of(cls, node: fx.Node) -> Offload:
        return cls(*_copy_of(node, over=node.target is cotrain.offload_into))

    @property
    def call(self) -> tuple[Any, tuple[Any, ...]]:
        """The target and the arguments of its node; so for all views."""
        is_new = self.destination is None
        return (cotrain.offload if is_new else cotrain.offload_into), _copy_arguments(self)


@dataclass(frozen=True, slots=True)
class Prefetch:
    """As `Offload`, from the host to the device."""

    source: fx.Node
    launch: Launch
    destination: fx.Node | None = None

    @classmethod
    def of(cls, node: fx.Node) -> Prefetch:
        return cls(*_copy_of(node, over=node.target is cotrain.prefetch_into))

    @property
    def call(self) -> tuple[Any, tuple[Any, ...]]:
        is_new = self.destination is None
        return (cotrain.prefetch if is_new else cotrain.prefetch_into), _copy_arguments(self)


@dataclass(frozen=True, slots=True)
class HostCast:
    """A new copy of `source` as `dtype`, both on the host."""

    source: fx.Node
    dtype: torch.dtype
    launch: Launch

    @classmethod
    def of(cls, node: fx.Node) -> HostCast:
        source, dtype, *launch = _arguments(node)
        return cls(source, dtype, _launch(*launch))

    @property
    def call(self) -> tuple[Any, tuple[Any, ...]]:
        return cotrain.host_cast, (self.source, self.dtype, *_launch_arguments(self.launch))


@dataclass(frozen=True, slots=True)
class RegionCall:
    """A subgraph that runs on the host with `inputs`, some of which it writes.

    `region` is the node that names the subgraph. An input of None is guessed: what is written then
    is nobody's until the call of the same subgraph that has all inputs.
    """

    region: fx.Node
    inputs: Sequence[Any]
    launch: Launch

    @classmethod
    def of(cls, node: fx.Node) -> RegionCall:
        region, task, after, inputs, *previous = _arguments(node)
        return cls(region, tuple(inputs), _launch(task, after, *previous))

    @property
    def call(self) -> tuple[Any, tuple[Any, ...]]:
        task, after, *previous = _launch_arguments(self.launch)
        return host_region, (self.region, task, after, list(self.inputs), *previous)

    @property
    def guesses(self) -> tuple[int, ...]:
        """Positions of the inputs that are guessed."""
        return tuple(position for position, v in enumerate(self.inputs) if v is None)

    def subgraph(self, module: fx.GraphModule) -> fx.GraphModule:
        """What it runs; `module` is the one that the node is in."""
        found = module.get_submodule(str(self.region.target))
        assert isinstance(found, fx.GraphModule)
        return found

    def given(self, module: fx.GraphModule) -> dict[fx.Node, Any]:
        """What each input of the subgraph gets."""
        placeholders = self.subgraph(module).graph.find_nodes(op="placeholder")
        return dict(zip(placeholders, self.inputs, strict=True))


@dataclass(frozen=True, slots=True)
class Wait:
    """The device goes on when `tasks` are done; until then the values in `kept` are not freed."""

    tasks: Sequence[str]
    kept: Sequence[fx.Node] = ()

    @classmethod
    def of(cls, node: fx.Node) -> Wait:
        tasks, kept = _arguments(node)
        return cls(tuple(tasks), tuple(kept))

    @property
    def call(self) -> tuple[Any, tuple[Any, ...]]:
        return cotrain.wait, (list(self.tasks), list(self.kept))


@dataclass(frozen=True, slots=True)
class WaitPrevious:
    """As `Wait`, for `tasks` of the step before."""

    tasks: Sequence[str]

    @classmethod
    def of(cls, node: fx.Node) -> WaitPrevious:
        (tasks,) = _arguments(node)
        return cls(tuple(tasks))

    @property
    def call(self) -> tuple[Any, tuple[Any, ...]]:
        return cotrain.wait_previous, (list(self.tasks),)


# What starts a task, and what waits for tasks.
TaskStart = Offload | Prefetch | HostCast | RegionCall
TaskNode = TaskStart | Wait | WaitPrevious

_KINDS: Mapping[Any, type[TaskNode]] = {
    cotrain.offload: Offload,
    cotrain.offload_into: Offload,
    cotrain.prefetch: Prefetch,
    cotrain.prefetch_into: Prefetch,
    cotrain.host_cast: HostCast,
    host_region: RegionCall,
    cotrain.wait: Wait,
    cotrain.wait_previous: WaitPrevious,
}


def view_of(node: fx.Node) -> TaskNode | None:
    """The view of a node that a pass has put in for a task, None for any other node."""
    kind = _KINDS.get(node.target)
    return None if kind is None else kind.of(node)


def start_of(node: fx.Node) -> TaskStart | None:
    """As `view_of`, of nodes that start a task alone."""
    view = view_of(node)
    return None if isinstance(view, Wait | WaitPrevious) else view


def region_calls(graph: fx.Graph) -> Iterator[tuple[fx.Node, RegionCall]]:
    """The nodes that run subgraphs on the host, in their order."""
    for node in graph.find_nodes(op="call_function", target=host_region):
        yield node, RegionCall.of(node)


def insert(graph: fx.Graph, view: TaskNode) -> fx.Node:
    """A new node for `view`, where `graph` inserts."""
    return graph.call_function(*view.call)


def rewrite(node: fx.Node, view: TaskNode) -> None:
    """Makes `node` say what `view` does."""
    node.target, node.args = view.call


def launch_of(task: Task, part: Sequence[int] = ()) -> Launch:
    """How the node of a plan's `task` starts it; `part` is as of `Launch`."""
    return Launch(task.name, task.after, task.after_previous, task.bundle, tuple(part))


def _copy_of(node: fx.Node, *, over: bool) -> tuple[fx.Node, Launch, fx.Node | None]:
    destination, source, *launch = _arguments(node) if over else (None, *_arguments(node))
    return source, _launch(*launch), destination


def _copy_arguments(view: Offload | Prefetch) -> tuple[Any, ...]:
    over = () if view.destination is None else (view.destination,)
    return *over, view.source, *_launch_arguments(view.launch)


def _launch(
    task: str,
    after: Sequence[str],
    previous: Sequence[str] | None = None,
    bundle: str = "",
    part: Sequence[int] = (),
) -> Launch:
    return Launch(task, tuple(after), tuple(previous or ()), bundle, tuple(part))


def _launch_arguments(launch: Launch) -> tuple[Any, ...]:
    more: tuple[Any, ...] = (list(launch.after_previous),) if launch.after_previous else ()
    if launch.bundle or launch.part:
        more = (list(launch.after_previous), launch.bundle)
    if launch.part:
        more = (*more, list(launch.part))
    return launch.task, list(launch.after), *more


def _arguments(node: fx.Node) -> tuple[Any, ...]:
    return node.args

"""Reference: one step of the captured graph as it is, on copies that rest on the host.

In: a `StepGraph` that no pass has touched and the tensors of its inputs. Out: what the step should
return and write. Each op runs where it was captured, with ATen's own kernel; its arguments are
brought there for it and its result goes back to the host. So the device needs room for one op only,
and numbers and random draws are those of the device.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch.utils._pytree import tree_map_only

from cotrain_compile.dataflow import PERSISTENT_ROLES
from cotrain_compile.graph import StepGraph, returns_argument_memory, writes

HOST = torch.device("cpu")


@dataclass(frozen=True)
class Start:
    """What a step starts from: a copy of all state on the host, and the random generators."""

    inputs: tuple[Any, ...]
    generators: Mapping[torch.device, torch.Tensor]

    @classmethod
    def of(cls, step: StepGraph, inputs: Sequence[Any]) -> Start:
        """Taken before a step: copies what persists, shares what no step writes."""
        written = {destination.name for _, destination, _ in writes(step.module.graph)}
        copied = tuple(
            on(HOST, value.detach(), copy=True)
            if isinstance(value, torch.Tensor)
            and (item.role in PERSISTENT_ROLES or item.node in written)
            else value
            for item, value in zip(step.inputs, inputs, strict=True)
        )
        devices = {value.device for value in inputs if isinstance(value, torch.Tensor)}
        cuda = {device: torch.cuda.get_rng_state(device) for device in devices - {HOST}}
        return cls(copied, {HOST: torch.get_rng_state(), **cuda})

    def rewind_generators(self) -> None:
        """Make the random generators draw again what the step has drawn."""
        for device, state in self.generators.items():
            if device == HOST:
                torch.set_rng_state(state)
            else:
                torch.cuda.set_rng_state(state, device)


@dataclass(frozen=True)
class Expected:
    """What a step should do: `outputs` in order, and by placeholder what it writes.

    `changes` has the largest change of any element that a write makes.
    """

    outputs: tuple[Any, ...]
    inputs: Mapping[str, Any]
    changes: Mapping[str, float]


def run_reference(step: StepGraph, start: Start) -> Expected:
    """Run `step` once from `start`, whose copies it overwrites; the generators stay as they are."""
    program = _Reference(step.module)
    cuda = [device.index for device in start.generators if device != HOST]
    with torch.random.fork_rng(devices=cuda), torch.no_grad():
        start.rewind_generators()
        outputs = program.run(*start.inputs)
    inputs = {item.node: value for item, value in zip(step.inputs, start.inputs, strict=True)}
    return Expected(tuple(outputs), inputs, program.changes)


class _Reference(fx.Interpreter):
    def __init__(self, module: fx.GraphModule) -> None:
        super().__init__(module)
        self.changes: dict[str, float] = {}

    def run_node(self, n: fx.Node) -> Any:
        if n.target is torch.ops.aten.copy_.default:
            self._note_change(n)
        if n.op != "call_function" or _shows_its_argument(n):
            return super().run_node(n)
        args, kwargs = fx.node.map_arg((n.args, n.kwargs), self._where_captured)
        return tree_map_only(torch.Tensor, lambda t: on(HOST, t), n.target(*args, **kwargs))  # type: ignore[operator]

    def _where_captured(self, node: fx.Node) -> Any:
        value, traced = self.env[node], node.meta.get("val")
        if isinstance(value, torch.Tensor) and isinstance(traced, torch.Tensor):
            return on(traced.device, value)
        return value

    def _note_change(self, write: fx.Node) -> None:
        destination, value = write.all_input_nodes
        largest = largest_difference(self.env[destination], self.env[value])
        self.changes[destination.name] = max(largest, self.changes.get(destination.name, 0.0))


def _shows_its_argument(node: fx.Node) -> bool:
    """Whether a node's result is memory of an argument's: then it stays where that rests."""
    return node.target is operator.getitem or returns_argument_memory(node)


def on(device: torch.device, tensor: torch.Tensor, *, copy: bool = False) -> torch.Tensor:
    """`tensor` on `device`, with its strides; itself where it is there and no `copy` is asked."""
    if tensor.device == device and not copy:
        return tensor
    row = tensor.new_empty(0).set_(tensor.untyped_storage())
    moved = row.to(device, copy=True)
    return moved.as_strided(tensor.size(), tensor.stride(), tensor.storage_offset())


def largest_difference(a: torch.Tensor, b: torch.Tensor) -> float:
    """The largest difference of two elements; infinite where only one of them is NaN."""
    if not a.numel():
        return 0.0
    wide = torch.promote_types(a.dtype, torch.float64)
    gaps = (a.to(wide) - b.to(wide)).abs().masked_fill_(_equal(a, b), 0.0)
    return float(gaps.nan_to_num_(nan=float("inf"), posinf=float("inf")).max())


def elements_apart(a: torch.Tensor, b: torch.Tensor, allowed: float) -> int:
    """How many elements differ by more than `allowed`; with 0.0, how many differ at all."""
    apart = ~_equal(a, b)
    if allowed:
        wide = torch.promote_types(a.dtype, torch.float64)
        apart &= ~((a.to(wide) - b.to(wide)).abs() <= allowed)
    return int(apart.sum())


def _equal(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return (a == b) | (a.isnan() & b.isnan())

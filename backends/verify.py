"""Verify: the first steps of a plan, each run a second time without it, compared to the bit.

In: a `CompiledStep`, the graph it was made from, the options. Out: a callable in its place that
raises `VerifyError` at the first tensor that differs, in the order in which the step computes them.
What a fused kernel updates on the host, what runs in parts, and what follows from either, may
differ by `TOLERANCE` of the largest change (`docs/decisions/0005-fused-loops-by-structure.md`),
or by `ROUNDINGS` of it where values of few digits, as of bfloat16, are on the way.

Reference: one step of the captured graph as it is, on copies that rest on the host.

In: a `StepGraph` that no pass has touched and the tensors of its inputs. Out: what the step should
return and write. Each op runs where it was captured, with ATen's own kernel; its arguments are
brought there for it and its result goes back to the host. So the device needs room for one op only,
and numbers and random draws are those of the device.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, assert_never

import torch
from torch import fx
from torch.utils._pytree import tree_map_only

from cotrain_compile.backends.lifecycle.compiled_step import CompiledStep
from cotrain_compile.backends.lifecycle.deferred import wait_for_deferred
from cotrain_compile.backends.lifecycle.dry_run import AfterDryRun
from cotrain_compile.dataflow import PERSISTENT_ROLES, UpdateGroup
from cotrain_compile.errors import VerifyError
from cotrain_compile.extract.extract import buffer_names, extract
from cotrain_compile.graph import StepGraph, returns_argument_memory, writes
from cotrain_compile.machine import Tier
from cotrain_compile.options.parts import LoweringOptions
from cotrain_compile.passes.find_accesses import find_race_in
from cotrain_compile.plan import HostRegion, Plan, Task, Transfer
from cotrain_compile.runtime.host.trial import TOLERANCE

# A value of few digits is rounded in the forward, the backward and where parts are joined; a second
# moment squares it, which counts twice.
ROUNDINGS = 4
_DECIDED = (
    "Where a step goes by signs or comparisons (Rprop, a top-k), a rounding may decide: with "
    "split='off' and host_kernels='captured' it is compared to the bit. Else: "
)


@dataclass(frozen=True)
class Result:
    """One thing that a step leaves: node `made_by` computes or writes it.

    `position` is that of an output, or of an input that persists. `buffer` is its name in the plan.
    `may_differ` is by how much of its largest change roundings explain a difference, 0.0 where the
    plan promises its bits.
    """

    name: str
    buffer: str
    made_by: fx.Node
    position: int
    is_output: bool
    may_differ: float


class VerifiedStep:
    """Runs a step; its first `options.verify` steps are compared with the reference."""

    def __init__(self, run: AfterDryRun, step: StepGraph, options: LoweringOptions) -> None:
        self._run = run
        self._step = step
        self._options = options
        self._steps_left = options.verify
        self._results: list[Result] = []

    @property
    def compiled(self) -> CompiledStep:
        """What ran last: a dry run may plan again."""
        return self._run.compiled

    def __call__(self, inputs: list[Any]) -> Any:
        """Run one step. Raises `VerifyError` as the module says, and as `CompiledStep` does."""
        if not self._steps_left:
            return self._run(inputs)
        wait_for_deferred()
        start = Start.of(self._step, inputs)
        outputs = self._run(inputs)
        wait_for_deferred()
        expected = run_reference(self._step, start)
        found = _results(self._step, self.compiled.plan, self._options)
        self._results = sorted(found, key=_order(self._step.module.graph))
        for result in self._results:
            told = self._difference(result, inputs, outputs, expected)
            if told:
                self._adopt(inputs, expected)
                raise VerifyError(
                    f"step {self.compiled.steps} of this plan is not what the captured step "
                    f"computes: {told}. Parameters and states now hold the captured step's "
                    f"numbers. {_DECIDED if result.may_differ else ''}That is a bug of this "
                    "package: please report it with the folder of the option 'dump', and go on "
                    "with policy 'resident' or in eager"
                )
        self._steps_left -= 1
        return outputs

    def _difference(
        self, result: Result, inputs: Sequence[Any], outputs: Sequence[Any], expected: Expected
    ) -> str:
        """How what the step left differs from what it should be, "" where it does not."""
        node = self._step.inputs[result.position].node if not result.is_output else ""
        found = outputs[result.position] if result.is_output else inputs[result.position]
        right = expected.outputs[result.position] if result.is_output else expected.inputs[node]
        if not isinstance(right, torch.Tensor):
            return "" if found == right else f"{result.name} is {found}, not {right}"
        found = on(HOST, found.detach())
        allowed = _rounding(right, expected.changes.get(node), result.may_differ)
        count = elements_apart(found, right, allowed)
        if not count:
            return ""
        by = f"{largest_difference(found, right):.3g} at most"
        within = f" (rounding explains {allowed:.3g})" if allowed else ""
        moved = where_moved(self.compiled, result.buffer)
        elements = f"{count} of {right.numel()} elements"
        return f"{result.name} differs in {elements}, by {by}{within}; {moved}"

    def _adopt(self, inputs: Sequence[Any], expected: Expected) -> None:
        """Give the user's tensors the reference's values: a consistent step, whatever was wrong."""
        with torch.no_grad():
            for result in self._results:
                if not result.is_output:
                    right = expected.inputs[self._step.inputs[result.position].node]
                    inputs[result.position].copy_(right)


def refuse_race(placed: StepGraph) -> None:
    """Raise `VerifyError` where two accesses of a placed step are in a race."""
    race = find_race_in(placed)
    if race is not None:
        raise VerifyError(
            f"{race}. The step has not run. That is a bug of this package: please report it with "
            "the folder of the option 'dump', and go on with policy 'resident' or in eager"
        )


def _results(step: StepGraph, plan: Plan, options: LoweringOptions) -> Iterator[Result]:
    """All that a step leaves: outputs, and inputs that persist, written or not."""
    graph = step.module.graph
    rounded = _rounded(step.nodes, _apart_by_rounding(step, plan, options))
    buffer_of = buffer_names(step)
    output = next(iter(graph.find_nodes(op="output")))
    for position, node in enumerate(output.args[0]):
        if isinstance(node, fx.Node):
            buffer = buffer_of.get(node.name, "")
            name = f"output {position} ({buffer or node.name})"
            yield Result(name, buffer, node, position, True, rounded.get(node, 0.0))
    last_write = {destination: write for write, destination, _ in writes(graph)}
    placeholders = graph.find_nodes(op="placeholder")
    for position, (node, item) in enumerate(zip(placeholders, step.inputs, strict=True)):
        if node in last_write or item.role in PERSISTENT_ROLES:
            made_by = last_write.get(node, node)
            name = f"{item.role.value} {item.name}"
            yield Result(name, item.name, made_by, position, False, rounded.get(made_by, 0.0))


def _order(graph: fx.Graph) -> Callable[[Result], int]:
    """Sorts results by when the step makes them."""
    index = {node: number for number, node in enumerate(graph.nodes)}
    return lambda result: index[result.made_by]


def _apart_by_rounding(step: StepGraph, plan: Plan, options: LoweringOptions) -> Iterator[fx.Node]:
    """Writes that a fused kernel may do, and ops that run in parts."""
    if options.host_kernels == "fused":
        params = {region.param for region in plan.host_updates}
        for write, destination, _ in writes(step.module.graph):
            item = step.input_of_node.get(destination.name)
            if item is not None and (item.param or item.name) in params:
                yield write
    if plan.placement.splits:
        split = [r for r in extract(step).regions if plan.placement.splits.get(r.name, 1) > 1]
        in_parts = {op.name for region in split for op in region.ops}
        yield from (node for node in step.nodes if node.name in in_parts)


def _rounded(nodes: Iterable[fx.Node], first: Iterable[fx.Node]) -> dict[fx.Node, float]:
    """`first`, and all that is computed from what they make: by how much each may differ.

    Sums in another order may round a value of few digits the other way, which all behind it shows.
    """
    found = dict.fromkeys(first, TOLERANCE)
    for node in nodes:
        before = [found[source] for source in node.all_input_nodes if source in found]
        if before or node in found:
            found[node] = max([*before, TOLERANCE, _coarseness(node)])
    return found


def _coarseness(node: fx.Node) -> float:
    """By how much roundings may change what a node makes, 0.0 where that is no floating point."""
    made = node.meta.get("val")
    if not (isinstance(made, torch.Tensor) and made.is_floating_point()):
        return 0.0
    return ROUNDINGS * torch.finfo(made.dtype).eps


def _rounding(right: torch.Tensor, change: float | None, may_differ: float) -> float:
    """By how much a result may differ that may do so by a part of its change."""
    if not may_differ or not right.numel() or not right.is_floating_point():
        return 0.0
    largest = float(right.double().abs().max())
    scale = largest if change is None else change
    # Bias corrections are taken in float32, whatever is wider.
    eps = max(torch.finfo(right.dtype).eps, torch.finfo(torch.float32).eps)
    return may_differ * scale + 4 * eps * largest


def where_moved(compiled: CompiledStep, buffer: str) -> str:
    """The home of `buffer` and the tasks that touch it, with those they come after."""
    plan, updates = compiled.plan, compiled.problem.dataflow.update
    home = plan.placement.homes.get(buffer, Tier.DEVICE)
    tasks = {task.name: task for task in plan.tasks}
    names = [task.name for task in plan.tasks if buffer in _touched(task, updates)]
    for name in names:  # grows while it is read
        names += [other for other in tasks[name].after if other not in names]
    told = ", ".join(names) if names else "none"
    return f"its home is the {home.value}, tasks of the plan that touch it: {told}"


def _touched(task: Task, updates: Mapping[str, UpdateGroup]) -> set[str]:
    """The buffers that a task reads or writes, by the update groups of the step."""
    match task:
        case Transfer():
            return {task.buffer, task.destination}
        case HostRegion(makes=copy) if copy:
            return {task.param, copy}
        case HostRegion():
            group = updates[task.param]
            return {task.param, group.gradient, *group.states, *group.scalars}
        case _:
            assert_never(task)


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

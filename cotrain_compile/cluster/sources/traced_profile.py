"""Traced profile: the layer profile of a step that was captured with a symbolic batch.

In: a `Dataflow` with symbols, a machine, and which symbols count the samples. Out: a chain of
layers, with the roofline's seconds and the bytes of the trace at some batch sizes. Nothing is run.

A layer is a numbered module (`model.layers.3`); what comes before the first, and after the last, is
named by the first module that is called there, else "input" and "head". An op of the backward
belongs to the layer whose gradient it makes, or whose parameters or inner values it reads, else to
that of the op before. Ops that make a value of the forward again belong to its layer, and say
nothing of the ops behind them. A gradient has the bytes of its parameter, as ranks sum it. No
torch.

On a cluster (`profile_on_cluster`) seconds are those of the first device, with how many times as
long the roofline of every other kind takes for the whole step; updates on the host are those of
that device's host, all of it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial

from cotrain_compile.analysis.costs import roofline
from cotrain_compile.analysis.layers import layer as layer_of
from cotrain_compile.analysis.liveness import Liveness, liveness
from cotrain_compile.analysis.symbolic import at
from cotrain_compile.cluster.model.description import Cluster, fastest_first
from cotrain_compile.cluster.model.profiles import (
    BySamples,
    Division,
    Layer,
    LayerProfile,
    chain,
)
from cotrain_compile.cluster.sources.divisions import (
    MOST,
    Split,
    divisions,
    figures_of,
    split_layer,
)
from cotrain_compile.dataflow import Dataflow, Op, Phase, Role
from cotrain_compile.errors import OptionError
from cotrain_compile.machine import Machine

SAMPLES = (1, 2, 4, 8, 16, 32, 64)
INPUT, HEAD = "input", "head"

# What has no bytes of its own to send to the next layer: every device has it.
_EVERYWHERE = frozenset(Role) - {Role.TEMPORARY, Role.WORKSPACE}


def profile_of_step(
    name: str,
    step: Dataflow,
    machine: Machine,
    symbols: Sequence[str] = (),
    *,
    samples: Sequence[int] = SAMPLES,
    tokens_per_sample: int = 1,
) -> LayerProfile:
    """The layers of `step` on a device of `machine`, for every number of samples in a micro-batch.

    `symbols` are the dimensions that count the samples, one for each tensor of the batch; where
    none are given, those of the first dimension of all tensors, if no other one has its size.
    Others keep the values of `step`, where a sequence may have its length. Raises OptionError where
    there are no such symbols.
    """
    taken = () if symbols else (f"The samples are counted by {', '.join(sample_symbols(step))}.",)
    symbols = sample_symbols(step, symbols)
    split = _Split(step)
    sizes = sorted(set(samples))
    found = [
        _at_size(split, at(step, {**step.symbols, **dict.fromkeys(symbols, n)}), machine)
        for n in sizes
    ]

    def table(layer: int, figure: str) -> BySamples:
        return BySamples(tuple(sizes), tuple(float(at_n[layer][figure]) for at_n in found))

    names = split.names
    divided = [
        divisions(one, params, partial(table, i), table(i, "input"))
        for i, (one, params) in enumerate(zip(split.divided, split.params, strict=True))
    ]
    reads = chain([table(i, "input") for i in range(len(names))], names)
    updates_s = roofline(step, machine).host_update_s
    return LayerProfile(
        name,
        tuple(
            Layer(
                name=names[i],
                op="layer",
                reads=reads[i],
                forward_s=table(i, "forward_s"),
                backward_s=table(i, "backward_s"),
                param_bytes=sum(step.buffer[param].nbytes for param in params),
                grad_bytes=sum(_gradient_bytes(step, param) for param in params),
                state_bytes=sum(_state_bytes(step, param) for param in params),
                host_update_s=sum(updates_s.get(param, 0.0) for param in params),
                forward_peak_bytes=table(i, "forward_peak"),
                backward_peak_bytes=table(i, "backward_peak"),
                kept_bytes=table(i, "kept"),
                tensor=divided[i][0],
                experts=divided[i][1],
            )
            for i, params in enumerate(split.params)
        ),
        source=f"traced step {step.fingerprint[:12]}, roofline of {machine.name}",
        assumed=(_seconds_of(machine), *taken, *_parts_assumed(divided)),
        tokens_per_sample=tokens_per_sample,
    )


def _seconds_of(machine: Machine) -> str:
    code = "compiled code" if machine.fuses_updates and machine.device.factors else "eager code"
    return f"Seconds are those of a roofline of {code}; nothing was run."


def _parts_assumed(
    divided: Sequence[tuple[Division | None, Division | None]],
) -> Iterator[str]:
    if any(tensor for tensor, _ in divided):
        yield (
            f"Heads, and rows and columns of weights, are taken to be shared evenly by {MOST} "
            "ranks at most; a step does not say how many there are."
        )
    if any(experts and experts.most == MOST for _, experts in divided):
        yield f"A layer is taken to have {MOST} experts, or a multiple, each as busy as any other."


def sample_symbols(step: Dataflow, symbols: Sequence[str] = ()) -> Sequence[str]:
    """The symbols that count the samples: those given, or what the batch was traced with."""
    if not step.symbols:
        raise OptionError(
            "the step has fixed sizes, so nobody knows it at another batch; trace it with "
            "`cotrain-compile trace --dynamic`"
        )
    symbols = symbols or _leading_symbols(step)
    if not symbols or not set(symbols) <= step.symbols.keys():
        known = ", ".join(f"{name} (now {value})" for name, value in sorted(step.symbols.items()))
        raise OptionError(
            f"{', '.join(symbols) or 'no symbol'} given for the samples; give one for each tensor "
            f"of the batch, of {known}"
        )
    return symbols


def _leading_symbols(step: Dataflow) -> Sequence[str]:
    """The only one, or those with the size of the batch's first dimension, if that is told apart.

    It is where all tensors begin with it and no other dimension of them has that size.
    """
    if len(step.symbols) == 1:
        return tuple(step.symbols)
    shapes = [shape for shape in step.job.batch.values() if shape]
    first = {shape[0] for shape in shapes}
    if len(first) != 1 or first & {size for shape in shapes for size in shape[1:]}:
        return ()
    return tuple(sorted(name for name, size in step.symbols.items() if size in first))


def _module_of(ops: Sequence[Op], layers: Sequence[str], otherwise: str) -> str:
    """The first module that is called beside the layers and holds none of them."""
    for op in ops:
        if op.module and not any(layer.startswith(f"{op.module}.") for layer in layers):
            return op.module
    return otherwise


@dataclass(frozen=True)
class _Split:
    """Which layer each op, each parameter and each value of a step belongs to, by number."""

    step: Dataflow

    @cached_property
    def _forward(self) -> tuple[Mapping[str, int], tuple[str, ...]]:
        """Layers of the forward's ops, in the order in which they begin."""
        ops = [op for op in self.step.ops if op.phase is Phase.FORWARD]
        layers = [layer_of(op.module) for op in ops]
        numbered = [i for i, layer in enumerate(layers) if layer]
        begin, end = (numbered[0], numbered[-1] + 1) if numbered else (len(ops), len(ops))
        around = (_module_of(ops[:begin], layers, INPUT), _module_of(ops[end:], layers, HEAD))
        names: list[str] = []
        found = {}
        for i, op in enumerate(ops):
            name = layers[i] or (around[0] if i < begin else around[1] if i >= end else names[-1])
            if name not in names:
                names.append(name)
            found[op.name] = len(names) - 1
        if not names:
            raise OptionError("the step has no forward, so it has no layers; trace a whole step")
        return found, tuple(names)

    @property
    def names(self) -> tuple[str, ...]:
        return self._forward[1]

    @cached_property
    def ops(self) -> Mapping[str, int]:
        """The layer of each op of the forward and the backward."""
        found = dict(self._forward[0])
        makers = {g.gradient: self.param_layer[g.param] for g in self.step.updates}
        inner = self._inner_values()
        current = len(self.names) - 1
        carried: set[str] = set()  # gradients, and all that is made from them
        for op in self.step.ops:
            if op.phase is not Phase.BACKWARD:
                continue
            known = [inner[name] for name in op.reads if name in inner]
            again = bool(carried) and op.writes and carried.isdisjoint(op.reads)
            if not again:
                carried.update(op.writes)
            makes = [makers[name] for name in op.writes if name in makers]
            if makes:
                found[op.name] = max(makes)
            elif again:
                found[op.name] = min(known, default=current)
            else:
                found[op.name] = current = min([current, *known])
        return found

    def _inner_values(self) -> dict[str, int]:
        """Parameters, and values of the forward that one layer alone makes and reads."""
        forward = self._forward[0]
        users: dict[str, set[int]] = {}
        for op in self.step.ops:
            if op.name in forward:
                for name in (*op.reads, *op.writes):
                    users.setdefault(name, set()).add(forward[op.name])
        kinds = (Role.PARAM, Role.TEMPORARY)
        return {
            name: min(layers)
            for name, layers in users.items()
            if len(layers) == 1 and self.step.buffer[name].role in kinds
        }

    @cached_property
    def param_layer(self) -> Mapping[str, int]:
        """The layer of each parameter: the first that reads it, else the first of all."""
        forward = self._forward[0]
        found = {b.name: 0 for b in self.step.buffers if b.role is Role.PARAM}
        for op in reversed(self.step.ops):
            if op.name in forward:
                found |= {name: forward[op.name] for name in op.reads if name in found}
        return found

    @property
    def params(self) -> list[list[str]]:
        """The parameters of each layer."""
        return [
            [param for param, layer in self.param_layer.items() if layer == i]
            for i in range(len(self.names))
        ]

    @cached_property
    def divided(self) -> Sequence[Split]:
        """Of each layer what ranks can divide."""
        own: list[list[Op]] = [[] for _ in self.names]
        for op in self.step.ops:
            if op.name in self.ops:
                own[self.ops[op.name]].append(op)
        return [split_layer(self.step, *each) for each in zip(own, self.params, strict=True)]

    @cached_property
    def made(self) -> Mapping[str, int]:
        """The layer of each value that the step makes: that of the op that first writes it."""
        found: dict[str, int] = {}
        for op in self.step.ops:
            for name in op.writes:
                if op.name in self.ops and self.step.buffer[name].role not in _KEPT_ROLES:
                    found.setdefault(name, self.ops[op.name])
        return found


_KEPT_ROLES = frozenset({Role.PARAM, Role.OPTIMIZER_STATE, Role.BUFFER, Role.RNG, Role.GROUP})


def _at_size(split: _Split, step: Dataflow, machine: Machine) -> list[dict[str, float]]:
    """Of each layer what depends on the samples, in a step with numbers for sizes."""
    costs, alive = roofline(step, machine), liveness(step)
    figures = []
    for i, params in enumerate(split.params):
        param_bytes = sum(step.buffer[name].nbytes for name in params)
        own = [(index, op) for index, op in enumerate(step.ops) if split.ops.get(op.name) == i]
        forward = [(index, op) for index, op in own if op.phase is Phase.FORWARD]
        backward = [(index, op) for index, op in own if op.phase is Phase.BACKWARD]
        mine = [name for name, layer in split.made.items() if layer == i]
        kept = _kept(step, mine)
        both = [op for _, op in (*forward, *backward)]
        figures.append(
            {
                **figures_of(split.divided[i], step, both, kept, costs.device_s),
                "forward_s": sum(costs.device_s[op.name] for _, op in forward),
                "backward_s": sum(costs.device_s[op.name] for _, op in backward),
                "forward_peak": param_bytes + _peak(step, alive, mine, forward),
                "backward_peak": param_bytes + _peak(step, alive, mine, backward),
                "kept": sum(step.buffer[name].nbytes for name in kept),
                "input": _input_bytes(split, step, i),
            }
        )
    return figures


def _peak(
    step: Dataflow, alive: Liveness, names: Sequence[str], ops: Sequence[tuple[int, Op]]
) -> int:
    """The most bytes of the values `names` during any of `ops`."""
    spans = [(alive.lifespans[name], step.buffer[name].nbytes) for name in names]
    return max(
        (sum(n for span, n in spans if span.start <= index < span.end) for index, _ in ops),
        default=0,
    )


def _kept(step: Dataflow, made: Sequence[str]) -> list[str]:
    """Of what a layer makes in the forward, what the backward reads."""
    written = {n for op in step.ops if op.phase is Phase.FORWARD for n in op.writes}
    read = {n for op in step.ops if op.phase is Phase.BACKWARD for n in op.reads}
    return [name for name in made if name in written and name in read]


def _input_bytes(split: _Split, step: Dataflow, layer: int) -> int:
    """What is made before a layer and read in it or behind it; of the first, the batch."""
    if layer == 0:
        return step.total_bytes(Role.BATCH)
    crossing = {
        name
        for op in step.ops
        if op.phase is Phase.FORWARD and split.ops[op.name] >= layer
        for name in op.reads
        if split.made.get(name, layer) < layer and step.buffer[name].role not in _EVERYWHERE
    }
    return sum(step.buffer[name].nbytes for name in crossing)


def _gradient_bytes(step: Dataflow, param: str) -> int:
    return step.buffer[param].nbytes if param in step.update else 0


def _state_bytes(step: Dataflow, param: str) -> int:
    group = step.update.get(param)
    return sum(step.buffer[state].nbytes for state in group.states) if group else 0


def profile_on_cluster(
    name: str,
    step: Dataflow,
    cluster: Cluster,
    symbols: Sequence[str] = (),
    *,
    samples: Sequence[int] = SAMPLES,
    tokens_per_sample: int = 1,
) -> LayerProfile:
    """`profile_of_step` on the fastest devices of `cluster`, with how much slower others are.

    Raises as it does.
    """
    cluster = fastest_first(cluster)
    kinds = {
        one.name: one.but(host=group.host, host_update=group.host_update)
        for group in cluster.groups
        for one in group.each
    }
    first, *others = [kinds[kind] for kind in dict.fromkeys(cluster.kinds)]
    profile = profile_of_step(
        name,
        runnable_on(step, first),
        first,
        symbols,
        samples=samples,
        tokens_per_sample=tokens_per_sample,
    )
    first_s = _device_s(step, first)
    slowness = {other.name: _device_s(step, other) / first_s for other in others}
    halved = [one.name for one in (first, *others) if runnable_on(step, one) is not step]
    if halved and any(op.dtype == "bfloat16" for op in step.ops):
        told = f"{', '.join(halved)} computes in float16 what is bfloat16 in the step."
        profile = replace(profile, assumed=(*profile.assumed, told))
    return replace(profile, slowness=slowness)


def _device_s(step: Dataflow, machine: Machine) -> float:
    return sum(roofline(runnable_on(step, machine), machine).device_s.values())


def runnable_on(step: Dataflow, machine: Machine) -> Dataflow:
    """The step in float16 on a device that has no rate for bfloat16 but one for float16."""
    rates = machine.device.flops_per_s
    if "bfloat16" in rates or "float16" not in rates:
        return step
    half = (replace(op, dtype="float16") if op.dtype == "bfloat16" else op for op in step.ops)
    return replace(step, ops=tuple(half))

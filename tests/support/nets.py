"""Training steps of small nets: layers in any wiring in, a whole step with Adam out.

A net is a list of `Layer`s that read the outputs of earlier ones ("x" is the batch). `step_of`
writes its forward, its backward in reverse and its updates. Layer l makes h_l in the forward and
reads d_l in the backward; parameter p has the gradient g_p, the moments m_p and v_p and the step
counter t_p; f_ and b_ are the ops of a layer, u_ the update.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from cotrain_compile.dataflow import Buffer, Dataflow, Op, Phase, Role, UpdateGroup

KIB = 1 << 10
MIB = 1 << 20


@dataclass(frozen=True)
class Layer:
    """One op of the forward: what it reads, the parameter it uses ("" for none), what it makes."""

    name: str
    reads: tuple[str, ...]
    param: str = ""
    param_bytes: int = 0
    made_bytes: int = MIB
    flops: int = 0


@dataclass(frozen=True)
class Training:
    """How a net is trained: parameters that stay as they are, clipping, micro-batches."""

    frozen: frozenset[str] = frozenset()
    clipped: bool = False
    micro_batches: int = 1


def step_of(name: str, net: Sequence[Layer], training: Training | None = None) -> Dataflow:
    """The step that trains `net` with Adam; its loss reads the last layer."""
    return _Builder(net, training or Training()).step(name)


class _Builder:
    def __init__(self, net: Sequence[Layer], training: Training) -> None:
        self.net, self.training = net, training
        self.param_bytes = {layer.param: layer.param_bytes for layer in net if layer.param}
        self.learned = [p for p in self.param_bytes if p not in training.frozen]
        self.buffers: dict[str, Buffer] = {}
        self.ops: list[Op] = []

    def step(self, name: str) -> Dataflow:
        for param in self.param_bytes:
            self._keep(param, Role.PARAM)
        for param in self.learned:
            for moment in ("m", "v"):
                self._keep(param, Role.OPTIMIZER_STATE, moment)
            self.buffers[f"t_{param}"] = _kept(f"t_{param}", 4, Role.OPTIMIZER_STATE)
        for batch in range(self.training.micro_batches):
            self._pass(f".{batch}" if self.training.micro_batches > 1 else "")
        scalars = self._clip() if self.training.clipped else ()
        updates = tuple(self._update(param, scalars) for param in self.learned)
        return Dataflow(name, tuple(self.ops), tuple(self.buffers.values()), updates)

    def _keep(self, param: str, role: Role, moment: str = "") -> None:
        name = f"{moment}_{param}" if moment else param
        self.buffers[name] = _kept(name, self.param_bytes[param], role)

    def _pass(self, batch: str) -> None:
        """Forward and backward of one micro-batch."""
        made_bytes = {"x": self.net[0].made_bytes, **{n.name: n.made_bytes for n in self.net}}
        self.buffers[f"x{batch}"] = Buffer(f"x{batch}", made_bytes["x"], Role.BATCH, is_input=True)
        for layer in self.net:
            self._forward(layer, batch)
        last = self.net[-1]
        self._value(f"loss{batch}", 4, is_output=True)
        self._value(f"d_{last.name}{batch}", last.made_bytes)
        made = (f"loss{batch}", f"d_{last.name}{batch}")
        self._op(f"loss_op{batch}", Phase.FORWARD, (f"h_{last.name}{batch}",), made, 0)
        for layer in reversed(self.net):
            self._backward(layer, made_bytes, batch)

    def _forward(self, layer: Layer, batch: str) -> None:
        reads = [_value_of(name, batch) for name in layer.reads]
        reads += [layer.param] if layer.param else []
        self._value(f"h_{layer.name}{batch}", layer.made_bytes)
        made = (f"h_{layer.name}{batch}",)
        self._op(f"f_{layer.name}{batch}", Phase.FORWARD, tuple(reads), made, layer.flops)

    def _backward(self, layer: Layer, made_bytes: dict[str, int], batch: str) -> None:
        """Gradients of the inputs and of the parameter, added to what other readers have left."""
        reads = [f"d_{layer.name}{batch}", *(_value_of(name, batch) for name in layer.reads)]
        reads += [layer.param] if layer.param else []
        made = [(f"d_{name}{batch}", made_bytes[name]) for name in layer.reads if name != "x"]
        if layer.param in self.learned:
            made.append((f"g_{layer.param}", layer.param_bytes))
        for name, nbytes in made:
            if name in self.buffers:
                reads.append(name)
            else:
                self._value(name, nbytes)
        writes = tuple(name for name, _ in made)
        op = f"b_{layer.name}{batch}"
        self._op(op, Phase.BACKWARD, tuple(reads), writes, 2 * layer.flops)

    def _clip(self) -> tuple[str, ...]:
        """The norm of all gradients, which every update then reads."""
        squares = []
        for param in self.learned:
            squares.append(f"s_{param}")
            self._value(squares[-1], 4)
            self._op(f"square_{param}", Phase.OPTIMIZER, (f"g_{param}",), (squares[-1],), 0)
        self._value("coefficient", 4)
        self._op("norm", Phase.OPTIMIZER, tuple(squares), ("coefficient",), 0)
        return ("coefficient",)

    def _update(self, param: str, scalars: tuple[str, ...]) -> UpdateGroup:
        gradient, states = f"g_{param}", (f"m_{param}", f"v_{param}", f"t_{param}")
        written = (param, *states)
        reads = (gradient, *written, *scalars)
        self._op(f"u_{param}", Phase.OPTIMIZER, reads, written, self.param_bytes[param])
        return UpdateGroup(param, gradient, states, scalars, (f"u_{param}",))

    def _value(self, name: str, nbytes: int, *, is_output: bool = False) -> None:
        self.buffers[name] = Buffer(name, nbytes, Role.TEMPORARY, is_output=is_output)

    def _op(
        self, name: str, phase: Phase, reads: tuple[str, ...], writes: tuple[str, ...], flops: int
    ) -> None:
        reads = tuple(dict.fromkeys(reads))
        moved = sum(self.buffers[b].nbytes for b in (*reads, *writes))
        self.ops.append(Op(name, f"test.{name}", phase, reads, writes, flops, moved))


def _value_of(name: str, batch: str) -> str:
    return f"x{batch}" if name == "x" else f"h_{name}{batch}"


def _kept(name: str, nbytes: int, role: Role) -> Buffer:
    return Buffer(name, nbytes, role, is_input=True)


# Nets. `unit` is the size of the smallest activation and `param` that of a parameter, in bytes.


def perceptron(layers: int, unit: int, param: int) -> list[Layer]:
    """A chain of matrices."""
    return [
        Layer(f"l{i}", (f"l{i - 1}" if i else "x",), f"w{i}", param, unit, param * 64)
        for i in range(layers)
    ]


def residual_conv(levels: int, unit: int, param: int) -> list[Layer]:
    """Down and up again as in a U-Net: large activations and small parameters first; each level's
    output is read again on the way up, and every convolution has a bypass."""
    net, before = list[Layer](), "x"
    for i in range(levels):
        made, weight = unit << (levels - i), max(4, param >> (2 * (levels - i)))
        net.append(Layer(f"c{i}", (before,), f"kernel{i}", weight, made, weight * 512))
        net.append(Layer(f"r{i}", (f"c{i}",), "", 0, made))
        net.append(Layer(f"s{i}", (f"c{i}", f"r{i}"), "", 0, made))
        before = f"s{i}"
    for i in reversed(range(levels)):
        made, weight = unit << (levels - i), max(4, param >> (2 * (levels - i)))
        reads = tuple(dict.fromkeys((before, f"s{i}")))
        net.append(Layer(f"e{i}", reads, f"up{i}", weight, made, weight * 512))
        before = f"e{i}"
    return net


def encoder_decoder(layers: int, unit: int, param: int) -> list[Layer]:
    """Every layer of the decoder reads the last of the encoder; both read one embedding."""
    net = [Layer("embed", ("x",), "table", 4 * param, unit)]
    before = "embed"
    for i in range(layers):
        net.append(Layer(f"e{i}", (before,), f"we{i}", param, unit, param * 64))
        before = f"e{i}"
    memory = before
    net.append(Layer("again", ("x",), "table", 4 * param, unit))
    before = "again"
    for i in range(layers):
        net.append(Layer(f"d{i}", (before, memory), f"wd{i}", param, unit, param * 64))
        before = f"d{i}"
    return net


def recurrent(times: int, unit: int, param: int) -> list[Layer]:
    """One cell used at every time step, and a matrix after the last."""
    net = [
        Layer(f"t{i}", ("x", f"t{i - 1}") if i else ("x",), "cell", param, unit, param * 64)
        for i in range(times)
    ]
    return [*net, Layer("out", (f"t{times - 1}",), "out_weight", param, unit, param * 64)]


def tied(layers: int, unit: int, param: int) -> list[Layer]:
    """A language model: its embedding is its last matrix too, and the logits are large."""
    net = [Layer("embed", ("x",), "table", 4 * param, unit)]
    net += [
        Layer(f"l{i}", (f"l{i - 1}" if i else "embed",), f"w{i}", param, unit, param * 64)
        for i in range(layers)
    ]
    return [*net, Layer("head", (net[-1].name,), "table", 4 * param, 4 * unit, param * 256)]


Step = Callable[[int, int, int], Dataflow]


def clipped_step(layers: int, unit: int, param: int) -> Dataflow:
    """No update before the last gradient."""
    net = perceptron(layers, unit, param)
    return step_of(f"clipped-{layers}", net, Training(clipped=True))


def finetune_step(layers: int, unit: int, param: int) -> Dataflow:
    """Only the last matrix learns."""
    net = perceptron(layers + 1, unit, param)
    frozen = frozenset(layer.param for layer in net[:-1])
    return step_of(f"finetune-{layers}", net, Training(frozen=frozen))


def accumulated_step(layers: int, unit: int, param: int) -> Dataflow:
    """Two micro-batches before the update."""
    net = perceptron(layers, unit, param)
    return step_of(f"accumulated-{layers}", net, Training(micro_batches=2))


def _plain(name: str, net: Callable[[int, int, int], list[Layer]]) -> Step:
    return lambda size, unit, param: step_of(f"{name}-{size}", net(size, unit, param))


STEPS: dict[str, Step] = {
    "perceptron": _plain("perceptron", perceptron),
    "clipped": clipped_step,
    "residual-conv": _plain("residual-conv", residual_conv),
    "encoder-decoder": _plain("encoder-decoder", encoder_decoder),
    "recurrent": _plain("recurrent", recurrent),
    "finetune": finetune_step,
    "tied": _plain("tied", tied),
    "accumulated": accumulated_step,
}


def every_small_step() -> Iterator[tuple[str, Dataflow]]:
    """One step of each kind, by name."""
    for name, build in STEPS.items():
        yield name, build(3, MIB, 2 * MIB)

"""Steps of equal blocks, which are numbered modules, for what is made again."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from cotrain_compile.dataflow import Dataflow, Phase, Role
from tests.support.nets import MIB, Layer, Training, step_of


def values(dataflow: Dataflow) -> frozenset[str]:
    """What the forward makes and the user does not hold."""
    made = {n for op in dataflow.ops if op.phase is Phase.FORWARD for n in op.writes}
    return frozenset(
        n for n in made if n.startswith("h_") and dataflow.buffer[n].role is Role.TEMPORARY
    )


def in_modules(dataflow: Dataflow, modules: Mapping[str, str]) -> Dataflow:
    """The step in which forward ops are called in modules, by the name of the op."""
    ops = (replace(op, module=modules.get(op.name, "")) for op in dataflow.ops)
    return replace(dataflow, ops=tuple(ops))


def blocks(count: int, training: Training | None = None) -> Dataflow:
    """Wide values inside each block, narrow ones between them, and a head that is no block."""
    net, modules = list[Layer](), {}
    for i in range(count):
        before = f"out{i - 1}" if i else "x"
        net.append(Layer(f"in{i}", (before,), f"w{i}", MIB, 4 * MIB, 1 << 30))
        net.append(Layer(f"act{i}", (f"in{i}",), "", 0, 4 * MIB))
        net.append(Layer(f"out{i}", (f"act{i}",), f"v{i}", MIB, MIB, 1 << 30))
        for part in ("in", "act", "out"):
            for batch in ("", *(f".{number}" for number in range(8))):
                modules[f"f_{part}{i}{batch}"] = f"model.blocks.{i}.{part}.0"
    net.append(Layer("head", (f"out{count - 1}",), "", 0, 8 * MIB))
    return in_modules(step_of("blocks", net, training), modules)

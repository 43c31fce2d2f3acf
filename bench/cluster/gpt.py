"""A GPT as a layer profile, by formula from its shape: for models that nobody traces.

In: hidden size, layers, heads, vocabulary, length, a machine. Out: a `LayerProfile` in mixed
precision with AdamW: 16-bit parameters and gradients, float32 masters and two states.

    products of a layer    24 s h^2 + 4 s^2 h flops a sample forward, twice that backward
                           (Narayanan et al., SC 2021, appendix), at the machine's rate for products
    attention              with `flash` its s^2 values never leave the chip; else 11 bytes of each
                           head's s^2 go through memory forward, and twice that backward: written
                           and read around the scaled mask, the soft maximum and the dropout, which
                           fused kernels do at once
    what is pointwise      44 s h bytes forward, in fused kernels: two norms (8), GELU with its bias
                           (16), two dropouts with residuals (20); twice that backward
    kept                   34 s h bytes, and 5 a s^2 without flash (Korthikanti et al., MLSys 2023)

Nothing here is fitted to a published figure. The rates and factors are those of the card's preset.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from cotrain_compile.cluster.model.profiles import (
    BATCH,
    Division,
    Layer,
    LayerProfile,
    Read,
    added,
    chain,
    constant,
    per_sample,
)
from cotrain_compile.machine import Machine

# 16-bit parameters and gradients; float32 masters, and two states.
PARAM_BYTES, GRAD_BYTES, STATE_BYTES = 2, 2, 12


@dataclass(frozen=True)
class Shape:
    """Of a GPT; `length` is that of a sample."""

    hidden: int
    layers: int
    heads: int
    vocabulary: int = 51200
    length: int = 2048
    flash: bool = False

    @property
    def parameters(self) -> int:
        """Of the layers and the embeddings."""
        h = self.hidden
        return self.layers * (12 * h * h + 13 * h) + (self.vocabulary + self.length) * h

    def step_flops(self, samples: int) -> float:
        """Forward, its repetition and backward, as the SC 2021 paper counts them."""
        h, s = self.hidden, self.length
        inner = 1 + s / (6 * h) + self.vocabulary / (16 * self.layers * h)
        return 96.0 * samples * s * self.layers * h * h * inner


@dataclass(frozen=True)
class _Rates:
    """Of a card, for 16 bits."""

    machine: Machine

    def products_s(self, flops: float) -> float:
        device = self.machine.device
        rate = device.flops_per_s.get("bfloat16") or device.flops_per_s["float16"]
        return flops / rate * device.factors.get("product", 1.0)

    def memory_s(self, nbytes: float) -> float:
        device = self.machine.device
        return nbytes / device.bytes_per_s * device.factors.get("fused", 1.0)


def gpt(name: str, shape: Shape, machine: Machine) -> LayerProfile:
    """The layers of a GPT on such a machine, tensors divided by heads and by vocabulary."""
    rates, h, s, v = _Rates(machine), shape.hidden, shape.length, shape.vocabulary
    crossing = 2.0 * s * h
    scores = 0 if shape.flash else shape.heads * s * s
    products_s = rates.products_s(24.0 * s * h * h + 4.0 * s * s * h)
    inner_s = rates.memory_s(16.0 * s * h + 11.0 * scores)
    outer_s = rates.memory_s(28.0 * s * h)
    kept = 34.0 * s * h + 5.0 * scores
    block_s = products_s + inner_s + outer_s
    division = Division(
        shape.heads,
        seconds=(products_s + inner_s) / block_s,
        params=1.0,
        kept=1 - 10.0 * s * h / kept,
        exchanged=per_sample(crossing),
    )
    blocks = [
        _layer(f"layers.{i}", crossing, block_s, 12 * h * h + 13 * h, kept, kept / 4, division)
        for i in range(shape.layers)
    ]
    by_vocabulary = Division(shape.heads, 1.0, 1.0, 1.0, per_sample(crossing), times=1)
    head_s = rates.products_s(2.0 * s * h * v) + rates.memory_s(6.0 * s * v)
    table = _layer("embedding", 8.0 * s, outer_s / 2, (v + s) * h, s * h, crossing, by_vocabulary)
    # Tied to the table in the model: as a stage of its own it has a copy, which counts here too.
    head = _layer("head", crossing, head_s, v * h, 6.0 * s * v, 4.0 * s * v, by_vocabulary)
    layers = [table, *blocks, head]
    reads = chain([layer.reads[0].nbytes for layer in layers], [layer.name for layer in layers])
    return LayerProfile(
        name,
        tuple(replace(layer, reads=read) for layer, read in zip(layers, reads, strict=True)),
        source=f"by formula, at the rates of {machine.name}",
        assumed=("Layers are by formula; nothing was traced.",),
        tokens_per_sample=s,
    )


def _layer(
    name: str,
    entering: float,
    forward_s: float,
    parameters: int,
    kept: float,
    working: float,
    division: Division,
) -> Layer:
    param_bytes, grad_bytes = PARAM_BYTES * parameters, GRAD_BYTES * parameters
    held = param_bytes + grad_bytes
    at_work = kept + working
    return Layer(
        name=name,
        op="layer",
        reads=(Read(BATCH, per_sample(entering)),),
        forward_s=per_sample(forward_s),
        backward_s=per_sample(2 * forward_s),
        param_bytes=param_bytes,
        grad_bytes=grad_bytes,
        state_bytes=STATE_BYTES * parameters,
        forward_peak_bytes=added(constant(param_bytes), per_sample(at_work)),
        backward_peak_bytes=added(constant(held), per_sample(at_work)),
        kept_bytes=per_sample(kept),
        tensor=division,
    )

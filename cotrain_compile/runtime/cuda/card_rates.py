"""Card rates: what a card that no preset describes can reach, from what its driver says of it.

In: the properties of a CUDA device, as `torch.cuda.get_device_properties` has them. Out: its tier,
and in words what that is taken from. Multiply-adds of a multiprocessor and clock are in NVIDIA's
architecture white papers and the throughput table of the CUDA programming guide; a multiply-add
counts as two. What is reached of them is the common fraction of the presets.
"""

from __future__ import annotations

from typing import Any

from cotrain_compile.machine import TierSpec

# Flops of a multiprocessor in a clock, dense, sums in float32: of tensor cores in bfloat16 or
# float16, and of float32 units. By compute capability; an unknown one counts as the last below it.
_PER_CLOCK = {
    (7, 0): (1024, 128),
    (7, 5): (1024, 128),
    (8, 0): (2048, 128),
    (8, 6): (1024, 256),
    (8, 9): (1024, 256),
    (9, 0): (4096, 256),
    (10, 0): (8192, 256),
    (12, 0): (1024, 256),
}
# GeForce cards of these sum in float32 at half the rate of their chips.
_HALVED = {(7, 5), (8, 6), (8, 9), (12, 0)}
_FIRST_BFLOAT16 = (8, 0)
_TENSOR_SHARE, _FLOAT32_SHARE, _MEMORY_SHARE = 0.6, 0.7, 0.85
_LAUNCH_S = 5e-6


def tier_of(properties: Any) -> tuple[TierSpec, str] | None:
    """The tier of a card and its source; None where the driver does not say enough."""
    capability = (int(properties.major), int(properties.minor))
    known = [each for each in _PER_CLOCK if each <= capability]
    # Of these, not every version of torch and of the driver tells.
    clock_khz = int(getattr(properties, "clock_rate", 0) or 0)
    memory_khz = int(getattr(properties, "memory_clock_rate", 0) or 0)
    bus_bits = int(getattr(properties, "memory_bus_width", 0) or 0)
    if not (known and clock_khz and memory_khz and bus_bits):
        return None
    tensor, single = _PER_CLOCK[known[-1]]
    if known[-1] in _HALVED and "GeForce" in str(properties.name):
        tensor //= 2
    clocks_per_s = int(properties.multi_processor_count) * clock_khz * 1e3
    low = _TENSOR_SHARE * tensor * clocks_per_s
    rates = {"float16": low, "float32": _FLOAT32_SHARE * single * clocks_per_s}
    if capability >= _FIRST_BFLOAT16:
        rates["bfloat16"] = low
    # Two transfers in a clock.
    bytes_per_s = _MEMORY_SHARE * 2 * memory_khz * 1e3 * bus_bits / 8
    source = (
        f"{properties.multi_processor_count} multiprocessors at {clock_khz / 1e6:.2f} GHz, "
        f"compute capability {capability[0]}.{capability[1]}: {tensor} flops each in a clock on "
        f"tensor cores x {_TENSOR_SHARE}, {single} in float32 x {_FLOAT32_SHARE}; memory of "
        f"{bus_bits} bits at {memory_khz / 1e6:.2f} GHz x {_MEMORY_SHARE}"
    )
    return TierSpec(int(properties.total_memory), bytes_per_s, rates, _LAUNCH_S), source

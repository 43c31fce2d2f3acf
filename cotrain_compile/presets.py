"""Presets: machines that a step can be planned for without owning one. Names in, `Machine` out.

Rates are achieved, not advertised. Where no measurement is published they are the data sheet's
figure times a fraction, and `source` says which. The common fractions: tensor-core matmul of a
training step 0.43 to 0.73, float32 matmul 0.7, device memory 0.85 to 0.9, PCIe 0.76 of its raw
16 lanes, host memory 0.75.

An AdamW update with float32 gradient, parameter and two moments reads 4 x 4 bytes and writes
3 x 4: 28 bytes per parameter. A bfloat16 gradient with a float32 master and a bfloat16 copy moves
28 as well (2 + 24 + 2). `ADAMW_BYTES_PER_PARAMETER` turns published parameters per second into
`HostUpdate.bytes_per_s`.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from cotrain_compile.errors import OptionError
from cotrain_compile.machine import HostUpdate, Link, Machine, TierSpec

ADAMW_BYTES_PER_PARAMETER = 28
THIS_MACHINE = "this-machine"

_GB = 10**9
_GIB = 2**30
_TERA = 10**12

# A copy or kernel that does nothing still takes this long: CUDA launch and DMA set-up, as commonly
# measured on current drivers.
_LAUNCH_S = 5e-6
_COPY_LATENCY_S = 10e-6
_HOST_LAUNCH_S = 10e-6


def _machine(
    name: str,
    *,
    device: TierSpec,
    host_capacity_bytes: int,
    host_bytes_per_s: float,
    host_flops_per_s: float,
    h2d_bytes_per_s: float,
    d2h_bytes_per_s: float,
    updated_parameters_per_s: float,
    duplex: float,
    source: str,
) -> Machine:
    """A GPU and its host. Updates and copies share the host's memory in proportion to demand."""
    update_bytes_per_s = updated_parameters_per_s * ADAMW_BYTES_PER_PARAMETER
    demand = update_bytes_per_s + h2d_bytes_per_s + d2h_bytes_per_s
    return Machine(
        name=name,
        device=device,
        host=TierSpec(
            capacity_bytes=host_capacity_bytes,
            bytes_per_s=host_bytes_per_s,
            flops_per_s={"float32": host_flops_per_s},
            launch_s=_HOST_LAUNCH_S,
        ),
        h2d=Link(h2d_bytes_per_s, _COPY_LATENCY_S),
        d2h=Link(d2h_bytes_per_s, _COPY_LATENCY_S),
        host_update=HostUpdate(
            bytes_per_s=update_bytes_per_s,
            slowdown_while_copying=max(1.0, demand / host_bytes_per_s),
        ),
        duplex=duplex,
        source=f"{source} Slowdown while copying: update and both links over the host's memory "
        "rate. Duplex, latencies and host flops: assumed; calibrate to replace them.",
        fuses_updates=True,
    )


def _gpu(
    capacity_bytes: int, bytes_per_s: float, low_precision_flops: float, float32_flops: float
) -> TierSpec:
    rates = {
        "bfloat16": low_precision_flops,
        "float16": low_precision_flops,
        "float32": float32_flops,
    }
    return TierSpec(capacity_bytes, bytes_per_s, rates, _LAUNCH_S)


def _v100_dgx2() -> Machine:
    return _machine(
        "v100-dgx2",
        # No bfloat16 here: the card has no such tensor cores, so it runs at the float32 rate.
        device=TierSpec(
            32 * _GIB, 750 * _GB, {"float16": 75 * _TERA, "float32": 11 * _TERA}, _LAUNCH_S
        ),
        host_capacity_bytes=1_500 * _GB,
        host_bytes_per_s=192 * _GB,
        host_flops_per_s=1.5 * _TERA,
        h2d_bytes_per_s=12 * _GB,
        d2h_bytes_per_s=12 * _GB,
        updated_parameters_per_s=10e9 / 2.57,
        duplex=1.8,
        source="V100 SXM3 data sheet: 125 TFLOP/s fp16 x 0.6, 15.7 fp32 x 0.7. Memory 750 GB/s: "
        "measured by Jia et al. 2018 (arXiv 1804.06826). PCIe 3 x16 15.75 GB/s x 0.76. Host: "
        "DGX-2, 1.5 TB, 12 channels DDR4-2666 = 256 GB/s x 0.75. Host update: ZeRO-Offload "
        "(USENIX ATC 2021) table 4, CPU-Adam 10 B parameters in 2.57 s on a DGX-2, x 28 bytes.",
    )


def _rtx_3090() -> Machine:
    return _machine(
        "rtx3090",
        device=_gpu(24 * _GIB, 842 * _GB, 52 * _TERA, 25 * _TERA),
        host_capacity_bytes=64 * _GB,
        host_bytes_per_s=67 * _GB,
        host_flops_per_s=0.5 * _TERA,
        h2d_bytes_per_s=22 * _GB,
        d2h_bytes_per_s=22 * _GB,
        updated_parameters_per_s=1.0e9,
        duplex=1.8,
        source="RTX 3090 data sheet: 71 TFLOP/s bf16 with fp32 sums x 0.73, 35.6 fp32 x 0.7, "
        "936 GB/s x 0.9. Same desktop as rtx4090: PCIe 4 x16 22 GB/s each way, host Adam 1.0 G "
        "parameters/s x 28 bytes (design assumptions), 64 GB of two channels DDR5-5600 = "
        "89.6 GB/s x 0.75.",
    )


def _rtx_4090() -> Machine:
    return _machine(
        "rtx4090",
        device=_gpu(24 * _GIB, 907 * _GB, 120 * _TERA, 58 * _TERA),
        host_capacity_bytes=64 * _GB,
        host_bytes_per_s=67 * _GB,
        host_flops_per_s=0.5 * _TERA,
        h2d_bytes_per_s=22 * _GB,
        d2h_bytes_per_s=22 * _GB,
        updated_parameters_per_s=1.0e9,
        duplex=1.8,
        source="RTX 4090 data sheet: 165 TFLOP/s bf16 with fp32 sums x 0.73 = 120, 82.6 fp32 x "
        "0.7, 1008 GB/s x 0.9. PCIe 4 x16 22 GB/s each way, host Adam 1.0 G parameters/s x 28 "
        "bytes (design assumptions). Host: 64 GB of two channels DDR5-5600 = 89.6 GB/s x 0.75.",
    )


def _a100_80() -> Machine:
    return _machine(
        "a100-80",
        device=_gpu(80 * _GIB, 1_770 * _GB, 218 * _TERA, 13.6 * _TERA),
        host_capacity_bytes=256 * _GB,
        host_bytes_per_s=154 * _GB,
        host_flops_per_s=1.5 * _TERA,
        h2d_bytes_per_s=24 * _GB,
        d2h_bytes_per_s=24 * _GB,
        updated_parameters_per_s=3.1e9,
        duplex=1.8,
        source="A100 SXM 80 GB data sheet: 312 TFLOP/s bf16 x 0.7, 19.5 fp32 x 0.7 (no TF32), "
        "2039 GB/s x 0.87. PCIe 4 x16 31.5 GB/s x 0.76. Host: the socket beside the GPU of a DGX "
        "A100 2 TB, 8 channels DDR4-3200 = 204.8 GB/s x 0.75, an eighth of the capacity. Host "
        "update: 204.8 GB/s x 0.43, the fraction that CPU-Adam reaches on v100-dgx2.",
    )


def _hopper(name: str, capacity_bytes: int, memory_bytes_per_s: float, memory: str) -> Machine:
    return _machine(
        name,
        device=_gpu(capacity_bytes, memory_bytes_per_s, 420 * _TERA, 47 * _TERA),
        host_capacity_bytes=256 * _GB,
        host_bytes_per_s=230 * _GB,
        host_flops_per_s=2 * _TERA,
        h2d_bytes_per_s=48 * _GB,
        d2h_bytes_per_s=48 * _GB,
        updated_parameters_per_s=1.6e9,
        duplex=1.8,
        source=f"{memory} 420 TFLOP/s bf16 (0.43 of the data sheet's 989), 48 GB/s each way "
        "(PCIe 5 x16 63 GB/s x 0.76), host Adam 1.6 G parameters/s x 28 bytes: design "
        "assumptions for an H200; the H100 has the same die. fp32: 67 TFLOP/s x 0.7 (no TF32). "
        "Host: the socket beside the GPU of a DGX H100/H200 2 TB, 8 channels DDR5-4800 = 307 GB/s "
        "x 0.75, an eighth of the capacity.",
    )


def _gh200() -> Machine:
    return _machine(
        "gh200",
        device=_gpu(96 * _GIB, 3_400 * _GB, 420 * _TERA, 47 * _TERA),
        host_capacity_bytes=480 * _GB,
        host_bytes_per_s=486 * _GB,
        host_flops_per_s=3 * _TERA,
        h2d_bytes_per_s=375 * _GB,
        d2h_bytes_per_s=297 * _GB,
        updated_parameters_per_s=7.8e9,
        duplex=1.8,
        source="GH200 96 GB + 480 GB: HBM3 3.4 TB/s, LPDDR5X 486 GB/s, NVLink-C2C 375 GB/s up and "
        "297 GB/s down, all measured by Schieffer et al. 2024 (arXiv 2407.07850). 420 TFLOP/s bf16 "
        "as h200 (same die), fp32 67 TFLOP/s x 0.7 (no TF32). Host update: data sheet 512 GB/s x "
        "0.43, the fraction that CPU-Adam reaches on v100-dgx2.",
    )


PRESETS: Mapping[str, Machine] = {
    machine.name: machine
    for machine in (
        _v100_dgx2(),
        _rtx_3090(),
        _rtx_4090(),
        _a100_80(),
        _hopper("h100", 80 * _GIB, 3_015 * _GB, "H100 SXM data sheet: 3.35 TB/s x 0.9."),
        _hopper(
            "h200",
            139 * _GIB,
            4_320 * _GB,
            "H200 SXM data sheet: 141 GB, of which 139 GiB are usable; 4.8 TB/s x 0.9.",
        ),
        _gh200(),
    )
}


def find(name_or_path: str) -> Machine:
    """The machine of that name, or the one in that JSON file.

    Raises:
        OptionError: neither a known name nor a file.
        FormatError: the file is not a machine.
    """
    if name_or_path in PRESETS:
        return PRESETS[name_or_path]
    if name_or_path == THIS_MACHINE:
        return this_machine()
    if os.path.isfile(name_or_path):
        from cotrain_compile.files import load  # needed for files only; presets stay plain data

        return load(name_or_path, Machine)
    raise OptionError(
        f"no machine named {name_or_path!r} and no such file; known are "
        f"{', '.join([*PRESETS, THIS_MACHINE])}, or a file written by `cotrain-compile calibrate`"
    )


def this_machine() -> Machine:
    """A cautious guess at this computer with an emulated device, from its cores and its memory.

    Host and device share the cores and split the memory. Rates are what one core of any recent
    server does at least; `cotrain-compile calibrate` replaces them with measured ones.
    """
    cores, memory_bytes = usable_cores(), usable_memory_bytes()
    half = TierSpec(
        capacity_bytes=memory_bytes // 2,
        bytes_per_s=min(5 * _GB * cores, 50 * _GB),
        flops_per_s={"float32": 20 * _GB * cores},
        launch_s=10e-6,
    )
    link = Link(4 * _GB, 50e-6)
    return Machine(
        name=THIS_MACHINE,
        device=half,
        host=half,
        h2d=link,
        d2h=link,
        host_update=HostUpdate(bytes_per_s=half.bytes_per_s, slowdown_while_copying=1.5),
        duplex=1.5,
        source=f"guess from {cores} usable cores and {memory_bytes} bytes of usable memory, "
        "nothing measured; run `cotrain-compile calibrate` for measured figures",
    )


def usable_cores() -> int:
    """Cores this process may run on: its affinity, cut by the cgroup's CPU quota."""
    allowed = len(os.sched_getaffinity(0))
    quota = cgroup_cores()
    return allowed if quota is None else max(1, min(allowed, int(quota)))


def usable_memory_bytes() -> int:
    """Memory of this computer, or the cgroup's limit where that is lower."""
    limit = cgroup_memory_limit_bytes()
    return installed_memory_bytes() if limit is None else min(installed_memory_bytes(), limit)


def installed_memory_bytes() -> int:
    """MemTotal of /proc/meminfo."""
    with open("/proc/meminfo") as lines:
        kib = next(line.split()[1] for line in lines if line.startswith("MemTotal:"))
    return int(kib) * 1024


def cgroup_memory_limit_bytes(root: Path = Path("/sys/fs/cgroup")) -> int | None:
    """The lowest memory limit that a cgroup (version 2 or 1) sets; None if it sets none."""
    found = [
        int(text)
        for name in ("memory.max", "memory/memory.limit_in_bytes")
        if (text := _text(root / name)).isdigit()
    ]
    # Version 1 writes "no limit" as the largest multiple of a page that fits 63 bits.
    limits = [limit for limit in found if limit < 2**62]
    return min(limits, default=None)


def cgroup_cores(root: Path = Path("/sys/fs/cgroup")) -> float | None:
    """The CPU quota of the cgroup (version 2 or 1) in cores; None if there is none."""
    quota, _, period = _text(root / "cpu.max").partition(" ")
    if not period:
        quota = _text(root / "cpu/cpu.cfs_quota_us")
        period = _text(root / "cpu/cpu.cfs_period_us")
    return int(quota) / int(period) if quota.isdigit() and period.isdigit() else None


def _text(path: Path) -> str:
    """A small system file, "" where this computer has none of that name."""
    return path.read_text().strip() if path.is_file() else ""

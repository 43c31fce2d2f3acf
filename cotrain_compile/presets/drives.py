"""Preset drives: what beside a host states may rest on, as rows of figures with sources. No torch.

GB, and GB/s of large direct reads and writes. Reads are the data sheet's times 0.9; writes are what
drives keep up behind their cache of fast cells, which a training fills in its first minutes.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from cotrain_compile.machine import Disk

_GB = 1e9


class Drive(NamedTuple):
    """GB, GB/s read and written."""

    gb: int
    read: float
    write: float
    source: str


# fmt: off
DRIVES: Mapping[str, Drive] = {
    "nvme-pcie5": Drive(2000, 10.8, 5.0,
        "PCIe 5 NVMe: data sheets 12 GB/s read x 0.9; 10 written into the cache, 5 assumed behind "
        "it."),
    "nvme-pcie4": Drive(2000, 6.3, 3.0,
        "PCIe 4 NVMe: data sheets 7 GB/s read x 0.9; 5 written into the cache, 1.5 to 4 behind it "
        "by public tests: 3."),
    "nvme-pcie3": Drive(1000, 3.0, 1.2,
        "PCIe 3 NVMe: data sheets 3.4 GB/s read x 0.9; 1.2 written behind the cache (assumed)."),
    "sata": Drive(2000, 0.5, 0.45,
        "SATA: 0.56 GB/s x 0.9 read; 0.45 written (assumed)."),
}
# fmt: on

# The drive beside each host of `presets.tables`.
_BESIDE = {
    "desktop-pcie5": "nvme-pcie5",
    "dgx-h100": "nvme-pcie5",
    "server-pcie5": "nvme-pcie5",
    "grace": "nvme-pcie5",
    "half-grace": "nvme-pcie5",
    "dgx-2": "nvme-pcie3",
    "server-pcie3": "nvme-pcie3",
}


def drive(name: str) -> Disk:
    """The drive of that name."""
    row = DRIVES[name]
    return Disk(int(row.gb * _GB), row.read * _GB, row.write * _GB)


def drive_beside(host: str) -> Disk:
    """The drive of a host: of PCIe 4 unless the host's links are of another."""
    return drive(_BESIDE.get(host, "nvme-pcie4"))

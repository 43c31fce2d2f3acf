"""Preset tables: hosts, servers and drives as rows of figures with their sources. No torch.

Rates are achieved, not advertised. What no one has published a measurement of is the data sheet's
figure times a fraction, which the source of the row names. The cards are in `presets.cards`.

Beside them drives, on which states may rest, in GB and GB/s of large direct reads and writes. Reads
are the data sheet's times 0.9; writes are what drives keep up behind their cache of fast cells,
which a training fills in its first minutes.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from cotrain_compile.machine import Disk


class Host(NamedTuple):
    """What stands beside a device: GB, GB/s of its memory and each way, G parameters/s of Adam.

    Both ways at once carry `together` times what one does; 1.8 is assumed.
    """

    name: str
    gb: int
    memory: float
    tflops: float
    up: float
    down: float
    adam: float
    source: str
    together: float = 1.8


class Server(NamedTuple):
    """Several cards of one computer, which share its host.

    GB and GB/s of the whole host; GB/s that each card has to it, up and down, while all are busy;
    GB/s that a card sends to the others in a ring (bus bandwidth, as nccl-tests call it).
    """

    name: str
    card: str
    cards: int
    gb: int
    memory: float
    tflops: float
    up: float
    down: float
    adam: float
    ring: float
    source: str


_A100_TOGETHER = (
    " Both ways at once: 24 GB/s down and 11 to 13 up, where one alone has 25, on A100 cards "
    "(NVIDIA/nvbandwidth issues 11 and 53)."
)

# fmt: off
HOSTS = (
    Host("dgx-2", 1500, 192, 1.5, 12, 12, 10 / 2.57,
         "PCIe 3 x16 15.75 GB/s x 0.76. Host: DGX-2, 1.5 TB, 12 channels DDR4-2666 = 256 GB/s x "
         "0.75. Host update: ZeRO-Offload (USENIX ATC 2021) table 4, CPU-Adam 10 B parameters in "
         "2.57 s on a DGX-2, x 28 bytes."),
    Host("desktop", 64, 67, 0.5, 22, 22, 1.0,
         "PCIe 4 x16 22 GB/s each way, host Adam 1.0 G parameters/s x 28 bytes (design "
         "assumptions). Host: 64 GB of two channels DDR5-5600 = 89.6 GB/s x 0.75."),
    Host("desktop-pcie5", 64, 67, 0.5, 48, 48, 1.0,
         "PCIe 5 x16 63 GB/s x 0.76. Host Adam 1.0 G parameters/s x 28 bytes (design assumption). "
         "Host: 64 GB of two channels DDR5-5600 = 89.6 GB/s x 0.75."),
    Host("desktop-x8", 64, 67, 0.5, 12, 12, 1.0,
         "PCIe 4 x8 15.75 GB/s x 0.76. Host Adam 1.0 G parameters/s x 28 bytes (design "
         "assumption). Host: 64 GB of two channels DDR5-5600 = 89.6 GB/s x 0.75."),
    Host("laptop", 32, 62, 0.4, 12, 12, 0.9,
         "PCIe 4 x8 15.75 GB/s x 0.76. Host Adam 0.9 G parameters/s x 28 bytes: as of the desktop, "
         "by its memory. Host: 32 GB of two channels DDR5-5200 = 83.2 GB/s x 0.75."),
    Host("dgx-a100", 256, 154, 1.5, 24, 24, 3.1,
         "PCIe 4 x16 31.5 GB/s x 0.76. Host: the socket beside the GPU of a DGX A100 2 TB, 8 "
         "channels DDR4-3200 = 204.8 GB/s x 0.75, an eighth of the capacity. Host update: 204.8 "
         "GB/s x 0.43, the fraction that CPU-Adam reaches on v100-dgx2." + _A100_TOGETHER,
         1.45),
    Host("dgx-a100-1tb", 128, 154, 1.5, 24, 24, 3.1,
         "PCIe 4 x16 31.5 GB/s x 0.76. Host: the socket beside the GPU of a DGX A100 1 TB, 8 "
         "channels DDR4-3200 = 204.8 GB/s x 0.75, an eighth of the capacity. Host update: 204.8 "
         "GB/s x 0.43, the fraction that CPU-Adam reaches on v100-dgx2." + _A100_TOGETHER,
         1.45),
    Host("dgx-h100", 256, 230, 2.0, 48, 48, 1.6,
         "48 GB/s each way (PCIe 5 x16 63 GB/s x 0.76), host Adam 1.6 G parameters/s x 28 bytes: "
         "design assumptions. Host: the socket beside the GPU of a DGX H100/H200 2 TB, 8 channels "
         "DDR5-4800 = 307 GB/s x 0.75, an eighth of the capacity."),
    Host("server-pcie3", 192, 96, 1.0, 12, 12, 2.0,
         "PCIe 3 x16 15.75 GB/s x 0.76. Host: 192 GB of a socket with 6 channels DDR4-2666 = 128 "
         "GB/s x 0.75. Host update: 128 GB/s x 0.43, the fraction that CPU-Adam reaches on "
         "v100-dgx2."),
    Host("server-pcie4", 256, 230, 2.0, 24, 24, 1.6,
         "PCIe 4 x16 31.5 GB/s x 0.76. Host Adam 1.6 G parameters/s x 28 bytes (design "
         "assumption). Host: 256 GB of a socket with 8 channels DDR5-4800 = 307 GB/s x 0.75."
         + _A100_TOGETHER,
         1.45),
    Host("server-pcie5", 256, 230, 2.0, 48, 48, 1.6,
         "PCIe 5 x16 63 GB/s x 0.76. Host Adam 1.6 G parameters/s x 28 bytes (design assumption). "
         "Host: 256 GB of a socket with 8 channels DDR5-4800 = 307 GB/s x 0.75."),
    Host("grace", 480, 486, 3.0, 375, 297, 7.8,
         "LPDDR5X 486 GB/s, NVLink-C2C 375 GB/s up and 297 GB/s down, measured on a GH200 by "
         "Schieffer et al. 2024 (arXiv 2407.07850). Host update: data sheet 512 GB/s x 0.43, the "
         "fraction that CPU-Adam reaches on v100-dgx2."),
    Host("half-grace", 240, 243, 1.5, 187, 148, 3.9,
         "A Grace of 480 GB serves two GPUs: half of what Schieffer et al. 2024 (arXiv 2407.07850) "
         "measured on a GH200, of memory (486 GB/s) and NVLink-C2C (375 GB/s up, 297 GB/s down). "
         "Host update: half of 512 GB/s x 0.43, the fraction that CPU-Adam reaches on v100-dgx2."),
)

_DGX_H100 = (
    "two sockets with 16 channels DDR5-4800 = 614 GB/s x 0.75, 2 TB; PCIe 5 x16 for each card. "
    "Host update: 614 GB/s x 0.43. Ring of NVLink 4: 450 GB/s each way, of which NCCL reaches 365 "
    "to 370 (NVIDIA/nccl issue 1455)."
)

#          name, card               cards    GB  GB/s Tflop up down  adam ring
SERVERS = (
    Server("8xrtx4090", "rtx4090",      8,  512, 307, 3.0,  22,  22, 6.3,  20,
           "Two EPYC with 16 channels DDR4-3200 = 409.6 GB/s x 0.75, 512 GB, PCIe 4 x16 for each "
           "card. Host update: 409.6 GB/s x 0.43, as CPU-Adam on v100-dgx2. Ring through the "
           "host's memory, without peer access: 20 GB/s assumed, for eight RTX 5090 reach 28 "
           "(NVIDIA/nccl issue 1639). That exchanges take the cards' PCIe links is not counted."),
    Server("8xa100", "a100-80",         8, 2000, 307, 3.0,  12,  12, 6.3, 240,
           "DGX A100 2 TB: two sockets with 16 channels DDR4-3200 = 409.6 GB/s x 0.75; two cards "
           "share a PCIe 4 x16 of 24 GB/s (assumed). Host update: 409.6 GB/s x 0.43. Ring of "
           "NVLink 3: 300 GB/s each way x 0.8, the part that NCCL reaches on H100 (assumed)."),
    Server("8xh100", "h100",            8, 2000, 460, 4.0,  48,  48, 9.4, 370,
           f"DGX H100: {_DGX_H100}"),
    Server("8xh200", "h200",            8, 2000, 460, 4.0,  48,  48, 9.4, 370,
           f"DGX H200: {_DGX_H100}"),
    Server("2xgh200", "gh200",          2,  960, 972, 6.0, 375, 297, 15.6, 370,
           "GH200 NVL2: each card has a Grace of its own: memory, NVLink-C2C and host update as of "
           "gh200. Ring of NVLink 4 between the two as on H100 (assumed)."),
)
# fmt: on


_GB = 1e9


class DriveSheet(NamedTuple):
    """GB, GB/s read and written."""

    gb: int
    read: float
    write: float
    source: str


# fmt: off
DRIVES: Mapping[str, DriveSheet] = {
    "nvme-pcie5": DriveSheet(2000, 10.8, 5.0,
        "PCIe 5 NVMe: data sheets 12 GB/s read x 0.9; 10 written into the cache, 5 assumed behind "
        "it."),
    "nvme-pcie4": DriveSheet(2000, 6.3, 3.0,
        "PCIe 4 NVMe: data sheets 7 GB/s read x 0.9; 5 written into the cache, 1.5 to 4 behind it "
        "by public tests: 3."),
    "nvme-pcie3": DriveSheet(1000, 3.0, 1.2,
        "PCIe 3 NVMe: data sheets 3.4 GB/s read x 0.9; 1.2 written behind the cache (assumed)."),
    "sata": DriveSheet(2000, 0.5, 0.45,
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

"""Preset tables: cards and hosts as rows of figures with their sources. No torch.

Rates are achieved, not advertised: GB/s, and Tflop/s of the products of a training step. What no
one has published a measurement of is the data sheet's dense figure times a fraction, which the
source of the row names: 0.43 to 0.73 of tensor cores, 0.7 of float32, 0.85 to 0.9 of memory.

The data sheets' figures have been compared with public copies and tables of them (2026-11). Where a
vendor's text gives a figure with sparsity or with sums in half precision only, the row says from
what it follows; what nothing public confirmed says "unverified".
"""

from __future__ import annotations

from typing import NamedTuple


class Card(NamedTuple):
    """A device: GiB, then GB/s and Tflop/s as achieved; 0 for a dtype that it has no cores for."""

    name: str
    host: str
    gib: float
    memory: float
    bfloat16: float
    float16: float
    float8: float
    float32: float
    source: str


class Host(NamedTuple):
    """What stands beside a device: GB, GB/s of its memory and each way, G parameters/s of Adam."""

    name: str
    gb: int
    memory: float
    tflops: float
    up: float
    down: float
    adam: float
    source: str


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


_HOPPER = (
    "0.43 of the dense data sheet figures, as design assumption for an H200: 989 TFLOP/s bf16 and "
    "fp16, 1979 fp8, half of those with sparsity; 67 fp32 x 0.7 (no TF32)."
)
_BLACKWELL = "0.43 of the dense figures of the HGX data sheet, as of Hopper:"

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
    Host("dgx-a100", 256, 154, 1.5, 24, 24, 3.1,
         "PCIe 4 x16 31.5 GB/s x 0.76. Host: the socket beside the GPU of a DGX A100 2 TB, 8 "
         "channels DDR4-3200 = 204.8 GB/s x 0.75, an eighth of the capacity. Host update: 204.8 "
         "GB/s x 0.43, the fraction that CPU-Adam reaches on v100-dgx2."),
    Host("dgx-a100-1tb", 128, 154, 1.5, 24, 24, 3.1,
         "PCIe 4 x16 31.5 GB/s x 0.76. Host: the socket beside the GPU of a DGX A100 1 TB, 8 "
         "channels DDR4-3200 = 204.8 GB/s x 0.75, an eighth of the capacity. Host update: 204.8 "
         "GB/s x 0.43, the fraction that CPU-Adam reaches on v100-dgx2."),
    Host("dgx-h100", 256, 230, 2.0, 48, 48, 1.6,
         "48 GB/s each way (PCIe 5 x16 63 GB/s x 0.76), host Adam 1.6 G parameters/s x 28 bytes: "
         "design assumptions. Host: the socket beside the GPU of a DGX H100/H200 2 TB, 8 channels "
         "DDR5-4800 = 307 GB/s x 0.75, an eighth of the capacity."),
    Host("server-pcie4", 256, 230, 2.0, 24, 24, 1.6,
         "PCIe 4 x16 31.5 GB/s x 0.76. Host Adam 1.6 G parameters/s x 28 bytes (design "
         "assumption). Host: 256 GB of a socket with 8 channels DDR5-4800 = 307 GB/s x 0.75."),
    Host("grace", 480, 486, 3.0, 375, 297, 7.8,
         "LPDDR5X 486 GB/s, NVLink-C2C 375 GB/s up and 297 GB/s down, measured on a GH200 by "
         "Schieffer et al. 2024 (arXiv 2407.07850). Host update: data sheet 512 GB/s x 0.43, the "
         "fraction that CPU-Adam reaches on v100-dgx2."),
    Host("half-grace", 240, 243, 1.5, 187, 148, 3.9,
         "A Grace of 480 GB serves two GPUs: half of what Schieffer et al. 2024 (arXiv 2407.07850) "
         "measured on a GH200, of memory (486 GB/s) and NVLink-C2C (375 GB/s up, 297 GB/s down). "
         "Host update: half of 512 GB/s x 0.43, the fraction that CPU-Adam reaches on v100-dgx2."),
)

#        name, host                       GiB   GB/s  bf16 fp16  fp8  fp32
CARDS = (
    Card("v100-dgx2", "dgx-2",             32,   750,    0,  75,    0, 11,
         "V100 SXM3 data sheet: 125 TFLOP/s fp16 x 0.6, 15.7 fp32 x 0.7. Memory 750 GB/s: measured "
         "by Jia et al. 2018 (arXiv 1804.06826)."),
    Card("rtx3090", "desktop",             24,   842,   52,  52,    0, 25,
         "RTX 3090 data sheet: 71 TFLOP/s bf16 with fp32 sums x 0.73, 35.6 fp32 x 0.7, 936 GB/s x "
         "0.9."),
    Card("rtx4080", "desktop",             16,   645,   71,  71,  142, 34,
         "RTX 4080 data sheet (Ada): 97.5 TFLOP/s bf16 and 194.9 fp8 with fp32 sums, a quarter of "
         "the 390 and 780 published with sparsity and fp16 sums, x 0.73; 48.7 fp32 x 0.7, 716.8 "
         "GB/s x 0.9."),
    Card("rtx4090", "desktop",             24,   907,  120, 120,  241, 58,
         "RTX 4090 data sheet (Ada whitepaper, fp32 sums): 165.2 TFLOP/s bf16 and 330.3 fp8 x "
         "0.73, 82.6 fp32 x 0.7, 1008 GB/s x 0.9."),
    Card("rtx5090", "desktop-pcie5",       32, 1_613,  153, 153,  306, 73,
         "RTX 5090 data sheet (RTX Blackwell): 104.8 TFLOP/s fp32 x 0.7, 1792 GB/s x 0.9; with "
         "fp32 sums 209.5 bf16, a quarter of the 838 published with sparsity and fp16 sums, and "
         "419 fp8, twice that (unverified), x 0.73."),
    Card("a6000", "desktop",               48,   691,  113, 113,    0, 27,
         "RTX A6000 data sheet: 309.7 TFLOP/s bf16 with sparsity, 154.8 without, x 0.73; 38.7 fp32 "
         "x 0.7, 768 GB/s x 0.9."),
    Card("l40s", "server-pcie4",           48,   778,  264, 264,  535, 64,
         "L40S data sheet: 362 TFLOP/s bf16 and 733 fp8 x 0.73, 91.6 fp32 x 0.7, 864 GB/s x 0.9."),
    Card("a100-40", "dgx-a100-1tb",        40, 1_353,  218, 218,    0, 13.6,
         "A100 SXM 40 GB data sheet: 312 TFLOP/s bf16 x 0.7, 19.5 fp32 x 0.7 (no TF32), 1555 GB/s "
         "x 0.87."),
    Card("a100-80", "dgx-a100",            80, 1_770,  218, 218,    0, 13.6,
         "A100 SXM 80 GB data sheet: 312 TFLOP/s bf16 x 0.7, 19.5 fp32 x 0.7 (no TF32), 2039 GB/s "
         "x 0.87."),
    Card("h100-pcie", "dgx-h100",          80, 1_800,  325, 325,  650, 36,
         "H100 PCIe data sheet: 2 TB/s x 0.9; 756 TFLOP/s bf16 and 1513 fp8, half of what it has "
         "with sparsity, x 0.43 as of the SXM card; 51 fp32 x 0.7 (no TF32)."),
    Card("h100", "dgx-h100",               80, 3_015,  420, 420,  851, 47,
         f"H100 SXM data sheet: 3.35 TB/s x 0.9. {_HOPPER}"),
    Card("h200", "dgx-h100",              139, 4_320,  420, 420,  851, 47,
         f"H200 SXM data sheet: 141 GB, of which 139 GiB are usable; 4.8 TB/s x 0.9. {_HOPPER}"),
    Card("gh200", "grace",                 96, 3_400,  420, 420,  851, 47,
         "GH200 96 GB + 480 GB: HBM3 3.4 TB/s, measured by Schieffer et al. 2024 (arXiv "
         f"2407.07850). {_HOPPER}"),
    Card("b200", "dgx-h100",              167, 7_200,  967, 967, 1935, 56,
         "B200 data sheet: 180 GB = 167 GiB, 8 TB/s x 0.9. "
         f"{_BLACKWELL} 2250 TFLOP/s bf16 and fp16, 4500 fp8; 80 fp32 x 0.7."),
    Card("gb200", "half-grace",           173, 7_200, 1075, 1075, 2150, 56,
         "GB200 NVL72 data sheet, one GPU: 186 GB = 173 GiB, 8 TB/s x 0.9. "
         f"{_BLACKWELL} 2500 TFLOP/s bf16 and fp16, 5000 fp8; 80 fp32 x 0.7."),
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

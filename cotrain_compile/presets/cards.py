"""Preset cards: the cards that have a preset, as rows of figures with their sources. No torch.

Rates are achieved, not advertised: GB/s, and Tflop/s of the products of a training step. What no
one has published a measurement of is the data sheet's dense figure times a fraction, which the
source of the row names: 0.34 to 0.96 of tensor cores, 0.7 of float32, 0.85 to 0.9 of memory. A
GeForce card with sums in float32 has twice its float32 rate in bfloat16, and from Ada on four times
in float8 (NVIDIA's white papers of Ampere, Ada and RTX Blackwell).

The data sheets' figures have been compared with public copies and tables of them (2026-11). Where a
vendor's text gives a figure with sparsity or with sums in half precision only, the row says from
what it follows; what nothing public confirmed says "unverified".

Memory is `get_device_properties().total_memory`, which is less than what is on the box: what public
logs of training runs and of torch's errors have of each card under Linux, the least of recent
drivers (2026-11). "As" another card: of the same size, since no log of its own was found.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import NamedTuple


class Card(NamedTuple):
    """A device: MiB, MiB of L2, then GB/s and Tflop/s as achieved; 0 where it has no cores for it.

    `words` are those that the driver's name of it has, and `chip` its compute capability.
    """

    name: str
    words: str
    host: str
    chip: tuple[int, int]
    mib: int
    l2: int
    memory: float
    bfloat16: float
    float16: float
    float8: float
    float32: float
    source: str


_VOLTA, _TURING, _AMPERE, _GA10X = (7, 0), (7, 5), (8, 0), (8, 6)
_ADA, _HOPPER, _BLACKWELL, _RTX_BLACKWELL = (8, 9), (9, 0), (10, 0), (12, 0)


_BOOSTED = 0.96


def _geforce(
    name: str,
    words: str,
    host: str,
    chip: tuple[int, int],
    mib: int,
    l2: int,
    memory: float,
    single: float,
    more: str = "",
) -> Card:
    """A card by GB/s and float32 TFLOP/s of its data sheet.

    Desktop cards reach `_BOOSTED` of their tensor cores' rate, as published steps of RTX 3090 and
    4090 do (`bench.published.fit`): their clocks rise above the data sheet's. Laptops: assumed.
    """
    part = 0.73 if host == "laptop" else _BOOSTED
    low, has_float8 = 2 * single, chip >= _ADA
    eight = f" and {2 * low:.4g} fp8" if has_float8 else ""
    told = (
        f"{words} data sheet: {single:g} TFLOP/s fp32 x 0.7; with fp32 sums {low:.4g} bf16{eight} "
        f"x {part:g}; memory {memory:g} GB/s x 0.9.{more and ' '}{more}"
    )
    rates = (round(part * low),) * 2 + (round(part * 2 * low) if has_float8 else 0,)
    return Card(
        name, words, host, chip, mib, l2, round(0.9 * memory), *rates, round(0.7 * single), told
    )


_LAMBDA = "published steps of BERT (lambdal/deeplearning-benchmark)"
_SHEET_HOPPER = (
    "0.78 of the dense data sheet figures, as kernels of steps on an H200 (cuBLAS 13.0; "
    "bench/results/gpu_steps.json; steps published in 2023 reach 0.54): 989 TFLOP/s bf16 and fp16, "
    "1979 fp8, half of those with sparsity; 67 fp32 x 0.7."
)
_SHEET_BLACKWELL = "0.78 of the dense figures of the HGX data sheet, as of Hopper:"
_V100 = "Memory 750 GB/s: measured by Jia et al. 2018 (arXiv 1804.06826)."
_V100_SXM = "V100 SXM data sheet: 125 TFLOP/s fp16 x 0.6, 15.7 fp32 x 0.7."
_V100_PCIE = "V100 PCIe data sheet: 112 TFLOP/s fp16 x 0.6, 14 fp32 x 0.7."
_CLOCK = "Fp32: cores x boost clock at full power (unverified)."

# fmt: off
#        name, words in its name, host, chip        MiB    L2   GB/s  fp32
_DESKTOP = (
    _geforce("rtx3060", "RTX 3060", "desktop", _GA10X, 11_910, 3, 360, 12.7),
    _geforce("rtx3070", "RTX 3070", "desktop", _GA10X, 7_842, 4, 448, 20.3),
    _geforce("rtx3080", "RTX 3080", "desktop", _GA10X, 10_002, 5, 760, 29.8),
    _geforce("rtx3080-12", "RTX 3080", "desktop", _GA10X, 11_910, 6, 912, 30.6,
             "Memory as the RTX 3060's."),
    _geforce("rtx3080ti", "RTX 3080 Ti", "desktop", _GA10X, 11_910, 6, 912, 34.1),
    _geforce("rtx3090", "RTX 3090", "desktop", _GA10X, 24_124, 6, 936, 35.6),
    _geforce("rtx4060", "RTX 4060", "desktop-x8", _ADA, 7_806, 24, 272, 15.1,
             "Memory as the RTX 4060 Ti's."),
    _geforce("rtx4060ti-8", "RTX 4060 Ti", "desktop-x8", _ADA, 7_806, 32, 288, 22.1),
    _geforce("rtx4060ti-16", "RTX 4060 Ti", "desktop-x8", _ADA, 15_944, 32, 288, 22.1,
             "Memory as the RTX 4080 SUPER's."),
    _geforce("rtx4070", "RTX 4070", "desktop", _ADA, 11_994, 36, 504, 29.1),
    _geforce("rtx4070-super", "RTX 4070 SUPER", "desktop", _ADA, 11_994, 48, 504, 35.5,
             "Memory as the RTX 4070's."),
    _geforce("rtx4070ti", "RTX 4070 Ti", "desktop", _ADA, 11_994, 48, 504, 40.1,
             "Memory as the RTX 4070's."),
    _geforce("rtx4070ti-super", "RTX 4070 Ti SUPER", "desktop", _ADA, 15_944, 48, 672, 44.1,
             "Memory as the RTX 4080 SUPER's."),
    _geforce("rtx4080", "RTX 4080", "desktop", _ADA, 15_944, 64, 716.8, 48.7,
             "Memory as the RTX 4080 SUPER's."),
    _geforce("rtx4080-super", "RTX 4080 SUPER", "desktop", _ADA, 15_944, 64, 736, 52.2),
    Card("rtx4090", "RTX 4090", "desktop", _ADA, 24_081, 72, 907, 159, 159, 317, 58,
         "RTX 4090 data sheet (Ada whitepaper, fp32 sums): 165.2 TFLOP/s bf16 and 330.3 fp8 x "
         "0.96, 82.6 fp32 x 0.7, memory 1008 GB/s x 0.9."),
    _geforce("rtx5070", "RTX 5070", "desktop-pcie5", _RTX_BLACKWELL, 11_910, 48, 672, 30.9,
             "Memory as the RTX 3060's."),
    _geforce("rtx5070ti", "RTX 5070 Ti", "desktop-pcie5", _RTX_BLACKWELL, 15_840, 48, 896, 43.9,
             "Memory as the RTX 5080's."),
    _geforce("rtx5080", "RTX 5080", "desktop-pcie5", _RTX_BLACKWELL, 15_840, 64, 960, 56.3),
    _geforce("rtx5090", "RTX 5090", "desktop-pcie5", _RTX_BLACKWELL, 32_102, 96, 1792, 104.8,
             "Fp8 as twice bf16 (unverified)."),
)
_LAPTOP = (
    _geforce("rtx3060-laptop", "RTX 3060 Laptop", "laptop", _GA10X, 5_938, 3, 336, 13.1,
             f"{_CLOCK} Memory unverified."),
    _geforce("rtx3070-laptop", "RTX 3070 Laptop", "laptop", _GA10X, 7_842, 4, 448, 16.6,
             f"{_CLOCK} Memory as the RTX 3070's."),
    _geforce("rtx3080-laptop", "RTX 3080 Laptop", "laptop", _GA10X, 7_842, 4, 448, 21,
             f"{_CLOCK} Memory as the RTX 3070's; there is one with 16 GB."),
    _geforce("rtx4060-laptop", "RTX 4060 Laptop", "laptop", _ADA, 7_806, 32, 256, 14.6, _CLOCK),
    _geforce("rtx4070-laptop", "RTX 4070 Laptop", "laptop", _ADA, 7_806, 32, 256, 20, _CLOCK),
    _geforce("rtx4080-laptop", "RTX 4080 Laptop", "laptop", _ADA, 11_910, 48, 432, 33.9,
             f"{_CLOCK} Memory as the RTX 3060's."),
    _geforce("rtx4090-laptop", "RTX 4090 Laptop", "laptop", _ADA, 15_944, 64, 576, 39.7,
             f"{_CLOCK} Memory as the RTX 4080 SUPER's."),
    _geforce("rtx5070-laptop", "RTX 5070 Laptop", "laptop", _RTX_BLACKWELL, 7_806, 32, 384, 21.6,
             f"{_CLOCK} Memory as the RTX 4070 Laptop's."),
    _geforce("rtx5070ti-laptop", "RTX 5070 Ti Laptop", "laptop", _RTX_BLACKWELL, 11_910, 48, 672,
             26.1, f"{_CLOCK} Memory as the RTX 3060's."),
    _geforce("rtx5080-laptop", "RTX 5080 Laptop", "laptop", _RTX_BLACKWELL, 15_840, 64, 896, 35.1,
             f"{_CLOCK} Memory as the RTX 5080's."),
    _geforce("rtx5090-laptop", "RTX 5090 Laptop", "laptop", _RTX_BLACKWELL, 24_081, 64, 896, 45.3,
             f"{_CLOCK} Memory as the RTX 4090's."),
)

#        name, words, host, chip                     MiB   L2   GB/s  bf16 fp16  fp8  fp32
_OTHERS = (
    Card("a6000", "RTX A6000", "desktop", _GA10X, 48_676, 6, 691, 113, 113, 0, 27,
         "RTX A6000 data sheet: 309.7 TFLOP/s bf16 with sparsity, 154.8 without, x 0.73; 38.7 fp32 "
         "x 0.7, memory 768 GB/s x 0.9."),
    Card("rtx6000-ada", "RTX 6000 Ada", "desktop", _ADA, 48_520, 96, 864, 122, 122, 244, 64,
         "RTX 6000 Ada data sheet: 91.1 TFLOP/s fp32 x 0.7, memory 960 GB/s x 0.9; 364 bf16 and "
         "728 fp8, of which 300 W allow 0.34, as by "
         f"{_LAMBDA}."),
    Card("rtxpro6000", "RTX PRO 6000", "server-pcie5", _RTX_BLACKWELL, 97_249, 128, 1613,
         252, 252, 504, 88,
         "RTX PRO 6000 Blackwell data sheet, 600 W: 125 TFLOP/s fp32 x 0.7, memory 1792 GB/s x "
         "0.9; 503.8 bf16 and 1007.6 fp8, an eighth and a quarter of the 4030 fp4 with sparsity, "
         "x 0.5: between L40S and A100, as its watts for a TFLOP/s are (assumed)."),
    Card("v100-16", "V100 SXM2 16GB", "server-pcie3", _VOLTA, 16_160, 6, 750, 0, 75, 0, 11,
         f"{_V100_SXM} {_V100}"),
    Card("v100-32", "V100 SXM2 32GB", "server-pcie3", _VOLTA, 32_510, 6, 750, 0, 75, 0, 11,
         f"{_V100_SXM} {_V100}"),
    Card("v100-dgx2", "V100 SXM3", "dgx-2", _VOLTA, 32_510, 6, 750, 0, 75, 0, 11,
         f"{_V100_SXM} {_V100}"),
    Card("v100-pcie-16", "V100 PCIe 16GB", "server-pcie3", _VOLTA, 16_160, 6, 750, 0, 67, 0, 9.8,
         f"{_V100_PCIE} {_V100}"),
    Card("v100-pcie-32", "V100 PCIe 32GB", "server-pcie3", _VOLTA, 32_510, 6, 750, 0, 67, 0, 9.8,
         f"{_V100_PCIE} {_V100}"),
    Card("t4", "T4", "server-pcie3", _TURING, 14_930, 4, 272, 0, 32, 0, 5.7,
         "T4 data sheet, 70 W: 65 TFLOP/s fp16 x 0.73 / 1.5, as of the A10 (assumed); 8.1 fp32 x "
         "0.7, memory 320 GB/s x 0.85."),
    Card("a10", "A10", "server-pcie4", _GA10X, 22_587, 6, 540, 61, 61, 0, 22,
         "A10 data sheet, 150 W: 125 TFLOP/s bf16 x 0.73 / 1.5, for its steps are longer by that "
         f"than an A6000's at equal use of the cores by {_LAMBDA}; 31.2 fp32 x 0.7, memory 600 "
         "GB/s x 0.9. Memory as the A10G's."),
    Card("a40", "A40", "server-pcie4", _GA10X, 45_416, 6, 626, 109, 109, 0, 26,
         "A40 data sheet: 149.7 TFLOP/s bf16 x 0.73, 37.4 fp32 x 0.7, memory 696 GB/s x 0.9."),
    Card("l4", "L4", "server-pcie4", _ADA, 22_563, 48, 270, 59, 59, 118, 21,
         "L4 data sheet, 72 W: 121 TFLOP/s bf16 and 242 fp8, half of those with sparsity, x 0.73 / "
         "1.5, as of the A10 (assumed); 30.3 fp32 x 0.7, memory 300 GB/s x 0.9."),
    Card("l40s", "L40S", "server-pcie4", _ADA, 45_495, 96, 778, 132, 132, 268, 64,
         "L40S data sheet: 362 TFLOP/s bf16 and 733 fp8, of which 350 W allow 0.365: more than of "
         f"the RTX 6000 Ada, the same chip with 300 W, as {_LAMBDA} have that; 91.6 fp32 x 0.7, "
         "memory 864 GB/s x 0.9."),
    Card("a100-40", "A100 40GB", "dgx-a100-1tb", _AMPERE, 40_377, 40, 1_353, 218, 218, 0, 13.6,
         "A100 SXM 40 GB data sheet: 312 TFLOP/s bf16 x 0.7, 19.5 fp32 x 0.7, memory "
         "1555 GB/s x 0.87."),
    Card("a100-80", "A100 80GB", "dgx-a100", _AMPERE, 81_153, 40, 1_770, 218, 218, 0, 13.6,
         "A100 SXM 80 GB data sheet: 312 TFLOP/s bf16 x 0.7, 19.5 fp32 x 0.7, memory "
         "2039 GB/s x 0.87."),
    Card("a100-pcie-40", "A100 PCIe 40GB", "server-pcie4", _AMPERE, 40_377, 40, 1_353,
         156, 156, 0, 13.6,
         "A100 PCIe 40 GB data sheet, 250 W: 312 TFLOP/s bf16 x 0.7 / 1.4, for its steps are "
         f"longer by that than of the SXM card by {_LAMBDA}; 19.5 fp32 x 0.7, memory "
         "1555 GB/s x 0.87."),
    Card("a100-pcie-80", "A100 PCIe 80GB", "server-pcie4", _AMPERE, 81_153, 40, 1_683,
         174, 174, 0, 13.6,
         "A100 PCIe 80 GB data sheet, 300 W: 312 TFLOP/s bf16 x 0.7 / 1.25, for its steps are "
         f"longer by that than of the SXM card by {_LAMBDA}; 19.5 fp32 x 0.7, memory "
         "1935 GB/s x 0.87."),
    Card("h20", "H20", "dgx-h100", _HOPPER, 97_285, 60, 3_600, 108, 108, 216, 31,
         "H20 data sheet: 148 TFLOP/s bf16 and 296 fp8 x 0.73: its power is that of a far faster "
         "chip; 44 fp32 x 0.7, memory 4 TB/s x 0.9."),
    Card("h100-pcie", "H100 PCIe", "dgx-h100", _HOPPER, 81_008, 50, 1_800, 590, 590, 1180, 36,
         "H100 PCIe data sheet: memory 2 TB/s x 0.9; 756 TFLOP/s bf16 and 1513 fp8, half of what "
         "it has with sparsity, x 0.78 as of the SXM card; 51 fp32 x 0.7."),
    Card("h100", "H100", "dgx-h100", _HOPPER, 81_082, 50, 3_015, 771, 771, 1544, 47,
         f"H100 SXM data sheet: memory 3.35 TB/s x 0.9. {_SHEET_HOPPER}"),
    Card("h200", "H200", "dgx-h100", _HOPPER, 143_156, 50, 4_320, 771, 771, 1544, 47,
         f"H200 SXM data sheet: memory 4.8 TB/s x 0.9. {_SHEET_HOPPER}"),
    Card("gh200", "GH200", "grace", _HOPPER, 96_768, 50, 3_400, 771, 771, 1544, 47,
         "GH200 96 GB + 480 GB: memory 3.4 TB/s, measured by Schieffer et al. 2024 (arXiv "
         f"2407.07850). {_SHEET_HOPPER}"),
    Card("b200", "B200", "dgx-h100", _BLACKWELL, 182_631, 126, 7_200, 1755, 1755, 3510, 56,
         "B200 data sheet: memory 8 TB/s x 0.9. "
         f"{_SHEET_BLACKWELL} 2250 TFLOP/s bf16 and fp16, 4500 fp8; 80 fp32 x 0.7."),
    Card("gb200", "GB200", "half-grace", _BLACKWELL, 188_733, 126, 7_200, 1950, 1950, 3900, 56,
         "GB200 NVL72 data sheet, one GPU: memory 8 TB/s x 0.9. "
         f"{_SHEET_BLACKWELL} 2500 TFLOP/s bf16 and fp16, 5000 fp8; 80 fp32 x 0.7."),
)
# fmt: on
CARDS = (*_DESKTOP, *_LAPTOP, *_OTHERS)

# Cards whose rates are by one fraction each, which measured steps were fitted to: at more than a
# data sheet's clock, and of tensor cores that memory and power hold up. An H20 has few of them.
GEFORCE = frozenset(card.name for card in _DESKTOP)
HOPPER = frozenset(c.name for c in _OTHERS if c.chip == _HOPPER and c.name != "h20")
BLACKWELL = frozenset(c.name for c in _OTHERS if c.chip == _BLACKWELL)

# A card with one of these in its name is another than its namesake without: it has other units,
# less power, or a part of the card.
_OTHER_THAN_ITS_NAMESAKE = ("Laptop", "Max-Q", "Mobile", "NVL", "SUPER", "Ti", "D", "MIG")


def has_word(text: str, word: str) -> bool:
    """Whether `word` stands in `text` by itself, in any case: an RTX A1000 is no A100."""
    alone = rf"(?<![a-z0-9]){re.escape(word.lower())}(?![a-z0-9])"
    return re.search(alone, text.lower()) is not None


def like_card(name: str, memory_bytes: int) -> Card | None:
    """The card that a driver calls `name`; of several sizes the one nearest to `memory_bytes`."""
    fitting = list(_fitting(name))
    most = max((len(card.words.split()) for card in fitting), default=0)
    return min(
        (card for card in fitting if len(card.words.split()) == most),
        key=lambda card: abs((card.mib << 20) - memory_bytes),
        default=None,
    )


def _fitting(name: str) -> Iterator[Card]:
    kinds = {word for word in _OTHER_THAN_ITS_NAMESAKE if has_word(name, word)}
    for card in CARDS:
        words = card.words.split()
        if kinds <= set(words) and all(has_word(name, word) for word in words):
            yield card

"""Preset factors: how many times its roofline an op takes on a card, by its kind. No torch.

The constants are near those that are fitted on training steps that others have published and on
the kernels of steps on an H200, 1 where no row says anything: `python -m bench.published.fit`
prints them, and how far off they are on rows that they were not fitted on. What each multiplies is
in `constants_of`: one law for all cards but for what Hopper and GeForce cards differ in. Where what
was published of Hopper in 2023 contradicts the kernels of today, the kernels count.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from cotrain_compile.machine.op_classes import FACTORS, FUSED, ONE_BY_ONE, RELAYOUT, OpKind
from cotrain_compile.presets.cards import BLACKWELL, GEFORCE, HOPPER, Card, like_card

CONSTANTS: Mapping[str, float] = {
    "products": 1.07,
    "attention": 1.1,
    "attention, with a mask": 1.2,
    "convolutions": 1.08,
    "depthwise": 1.11,
    "relayout": 1.33,
    "memory, op by op": 1.39,
    "memory, op by op, Hopper": 1.27,
    "memory, fused": 1.04,
    # How far behind its products other work of a Hopper card is, besides: as its kernels take.
    "attention, Hopper": 2.3,
    "convolutions, Hopper": 1.4,
    "memory, fused, Hopper": 1.2,
}

# Between which published steps lie, as a part of what is predicted, with their family left out of
# the fit: eight of ten rows that are compiled, as a plan's step is, as `bench.published.fit` says.
# Of those there are only five, one of them a BERT that skips its padding; of 42 eager ones eight of
# ten lie within 0.89 to 1.19. A card that waits for its host is slower: two small compiled steps on
# an H200 took 1.3 times what is predicted of them, a tenth to a fifth of it without a kernel.
RANGE = 0.69, 1.28

_BY_KIND: Mapping[str, str] = {
    OpKind.PRODUCT: "products",
    OpKind.BATCHED_PRODUCT: "products",
    OpKind.ATTENTION: "attention",
    OpKind.ATTENTION_BACKWARD: "attention",
    OpKind.MASKED_ATTENTION: "attention",
    OpKind.MASKED_ATTENTION_BACKWARD: "attention",
    OpKind.CONVOLUTION: "convolutions",
    OpKind.CHANNELS_LAST: "convolutions",
    OpKind.DEPTHWISE: "depthwise",
    RELAYOUT: "relayout",
    ONE_BY_ONE: "memory, op by op",
    FUSED: "memory, fused",
}
_COMPUTING = frozenset(kind for kind in _BY_KIND if kind not in (RELAYOUT, ONE_BY_ONE, FUSED))


def constants_of(kind: str, card: Card | None) -> tuple[str, ...]:
    """The constants that multiply the roofline of ops of a kind on a card, None of no family.

    The two of a family of cards' rates are 1: `cards` has the rates that they were fitted to.
    """
    if kind not in _BY_KIND:
        return ()
    named = [_BY_KIND[kind]]
    if kind in (OpKind.MASKED_ATTENTION, OpKind.MASKED_ATTENTION_BACKWARD):
        named.append("attention, with a mask")
    if card is None:
        return tuple(named)
    if kind in _COMPUTING:
        named += ["rates, Hopper"] * (card.name in HOPPER)
        named += ["rates, GeForce"] * (card.name in GEFORCE)
    alike = HOPPER | BLACKWELL if kind in _COMPUTING else HOPPER
    behind = f"{named[0]}, Hopper"
    if behind in CONSTANTS and card.name in alike:
        named.append(behind)
    return tuple(named)


def factors_of(card: Card | None) -> dict[str, float]:
    """The factor of each kind on `card`, None for one that nobody knows."""
    found = {
        kind: math.prod(CONSTANTS.get(name, 1.0) for name in constants_of(kind, card))
        for kind in FACTORS
        if kind in _BY_KIND
    }
    return {str(kind): round(factor, 3) for kind, factor in found.items()}


def factors_like(name: str, memory_bytes: int) -> dict[str, float]:
    """The factor of each kind on the card that a driver calls `name`; of no family if unknown."""
    return factors_of(like_card(name, memory_bytes))

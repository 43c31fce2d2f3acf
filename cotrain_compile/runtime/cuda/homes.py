"""Homes: the user's persistent tensors, moved to the tier where a plan wants them to rest.

A tensor moves by its `.data`: the object that the model and the optimizer hold stays the same, and
so do sizes and strides. Tensors that share a storage move together, once. Where a tensor that rests
on the host computes is remembered, so that a trace can see it there.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from cotrain_compile.capture.dynamo.compute_device import resting_on_host
from cotrain_compile.capture.state.untouched import is_untouched_zero
from cotrain_compile.machine import Tier
from cotrain_compile.runtime.cuda.card import StreamsOfCard
from cotrain_compile.runtime.cuda.pinned import MAPPING_BYTES, PinnedPool
from cotrain_compile.runtime.storages import whole_storage


def bring_home(
    tensors: Sequence[tuple[torch.Tensor, Tier]], card: StreamsOfCard, pool: PinnedPool
) -> None:
    """Move each tensor to its tier, those for the host first: that makes room on the device.

    Of tensors that share a storage, the first says where. Returns with all copies done. Raises
    `HostMemoryError` or torch's out-of-memory error; what has moved by then stays where it is.
    """
    groups: dict[int, list[torch.Tensor]] = {}
    tiers: dict[int, Tier] = {}
    for tensor, tier in tensors:
        key = tensor.untyped_storage()._cdata
        groups.setdefault(key, []).append(tensor)
        tiers.setdefault(key, tier)
    for wanted in (Tier.HOST, Tier.DEVICE):
        offloaded = [
            members
            for key, members in groups.items()
            if tiers[key] is wanted and not _is_home(members[0], wanted, card, pool)
        ]
        for some in _together(offloaded):
            if wanted is Tier.HOST:
                pool.reserve([members[0].untyped_storage().nbytes() for members in some])
            for members in some:
                _move(members, wanted, card, pool)


def _together(offloaded: Sequence[list[torch.Tensor]]) -> Iterator[list[list[torch.Tensor]]]:
    """What is moved before the next memory is pinned: so much is held twice at most."""
    some, nbytes = list[list[torch.Tensor]](), 0
    for members in offloaded:
        if some and nbytes + members[0].untyped_storage().nbytes() > MAPPING_BYTES:
            yield some
            some, nbytes = [], 0
        some.append(members)
        nbytes += members[0].untyped_storage().nbytes()
    if some:
        yield some


def elsewhere(
    tensors: Sequence[torch.Tensor], tier: Tier, card: StreamsOfCard, pool: PinnedPool
) -> list[torch.Tensor]:
    """Those that `bring_home` would take to `tier` from the other one."""
    if tier is Tier.DEVICE:
        return [each for each in tensors if pool.holds(each)]
    on_card = (each for each in tensors if each.device == card.device)
    return [each for each in on_card if not _is_home(each, tier, card, pool)]


def rests_on_host(tensor: torch.Tensor, card: StreamsOfCard) -> None:
    """Let traces see `tensor`, which is on the host, on the device: its uses are there."""
    resting_on_host[tensor] = card.device


def _is_home(tensor: torch.Tensor, tier: Tier, card: StreamsOfCard, pool: PinnedPool) -> bool:
    if not tensor.untyped_storage().nbytes():
        return tensor.device.type == ("cpu" if tier is Tier.HOST else card.device.type)
    if tier is Tier.HOST:
        return pool.holds(tensor)
    return tensor.device == card.device and not pool.holds(tensor)


def _move(
    members: Sequence[torch.Tensor], tier: Tier, card: StreamsOfCard, pool: PinnedPool
) -> None:
    row = whole_storage(members[0].detach())
    if tier is Tier.HOST:
        moved = pool.empty_like(row)
        for event in pool.pending(moved):
            event.synchronize()
    else:
        moved = torch.empty_like(row, device=card.device)
    if is_untouched_zero(members[0]):
        moved.zero_()
    else:
        moved.copy_(row)
    for tensor in members:
        tensor.data = moved.as_strided(tensor.size(), tensor.stride(), tensor.storage_offset())
        if tier is Tier.HOST:
            rests_on_host(tensor, card)
        else:
            resting_on_host.pop(tensor, None)

"""Network bench: what ranks reach when they exchange data, measured by all of them together.

In: the default process group. Out: a `Network`, the same on every rank: bytes per second and
seconds a round, as an all-reduce and a gather of a large and of a tiny tensor take them; and how
much longer than by a ring a reduce-scatter takes.

Private torch API used: `torch.ops._c10d_functional` and the name of the default group. Reason: the
public reduce-scatter has another name from torch 2.13 on, and the ops are what a captured step
runs. Tried on torch 2.13.0.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial

import torch
import torch.distributed as dist

from cotrain_compile.dataflow import Collective
from cotrain_compile.distribute.ranks import count_of_ranks
from cotrain_compile.machine import Network
from cotrain_compile.runtime.calibrate.link_bench import Bench, Sizes, least_s
from cotrain_compile.support.limits import processes_here


@contextmanager
def ranks_of_torchrun(device: str) -> Iterator[int]:
    """Within it, the processes that torchrun has started are a process group; yields the rank.

    0 where there is one process. A group that is there already is left alone.
    """
    if int(os.environ.get("WORLD_SIZE", "1")) == 1 or dist.is_initialized():
        yield dist.get_rank() if dist.is_initialized() else 0
        return
    on_cards = device.startswith("cuda")
    if on_cards:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl" if on_cards else "gloo")
    try:
        yield dist.get_rank()
    finally:
        dist.destroy_process_group()


def ranks_here() -> int:
    """How many ranks share this computer, as torchrun says."""
    return processes_here() if count_of_ranks() > 1 else 1


def measured_network(bench: Bench, device: torch.device, sizes: Sizes) -> Network | None:
    """What the ranks reach together; None where there is one. Every rank has to call it."""
    if count_of_ranks() == 1:
        return None
    tiny, large = (
        _exchanges(device, nbytes) for nbytes in (sizes.small_copy_bytes, sizes.exchange_bytes)
    )
    tiny_s, large_s = (_slowest_s(bench, device, each, sizes.repeats) for each in (tiny, large))
    rounds = sum(collective.rounds for collective, _ in tiny)
    sent = sum(collective.wire_bytes for collective, _ in large)
    # On a busy computer a large exchange may take no longer than a tiny one.
    carrying_s = large_s - tiny_s if large_s > tiny_s else large_s
    network = Network(sent / carrying_s, tiny_s / rounds)
    collective, scatter = _scatter(device, sizes.exchange_bytes)
    ring_s = collective.rounds * network.latency_s + collective.wire_bytes / network.bytes_per_s
    scatter_s = _slowest_s(bench, device, [(collective, scatter)], sizes.repeats)
    return replace(network, scatter=max(1.0, scatter_s / ring_s))


def network_remark(network: Network | None) -> str:
    """Where the figures of `network` come from; "" without one."""
    if network is None:
        return ""
    scatter = ""
    if network.scatter > 1.1:
        scatter = f", in a reduce-scatter {network.scatter:.1f} times as much,"
    return (
        f"network: {network.bytes_per_s / 1e9:.2f} GB/s and {1e6 * network.latency_s:.0f} µs a "
        f"round{scatter} between {count_of_ranks()} ranks over {dist.get_backend()}; all of this "
        f"was measured by all ranks at once, {ranks_here()} of them on this computer"
    )


Exchanges = Sequence[tuple[Collective, Callable[[], object]]]


def _exchanges(device: torch.device, nbytes: int) -> Exchanges:
    """An all-reduce and a gather of `nbytes` in whole, and how to run them."""
    ranks = count_of_ranks()
    part = torch.ones(max(1, nbytes // 4 // ranks), device=device)
    whole = part.new_ones(ranks * part.numel())
    parts = list(whole.chunk(ranks))
    return (
        (Collective("all_reduce", ranks, whole.nbytes), lambda: dist.all_reduce(whole)),
        (
            Collective("all_gather_into_tensor", ranks, whole.nbytes),
            lambda: dist.all_gather(parts, part),
        ),
    )


def _scatter(device: torch.device, nbytes: int) -> tuple[Collective, Callable[[], object]]:
    """A reduce-scatter of `nbytes` in whole, and how to run it: as a captured step does."""
    ranks = count_of_ranks()
    whole = torch.ones(ranks * max(1, nbytes // 4 // ranks), device=device)
    group = dist.distributed_c10d._get_default_group().group_name
    ops = torch.ops._c10d_functional

    def run() -> object:
        return ops.wait_tensor(ops.reduce_scatter_tensor(whole, "sum", ranks, group))

    return Collective("reduce_scatter_tensor", ranks, whole.nbytes), run


def _slowest_s(bench: Bench, device: torch.device, exchanges: Exchanges, repeats: int) -> float:
    """Seconds of all `exchanges` one after the other, each on the rank where it takes longest."""

    def once(run: Callable[[], object]) -> float:
        dist.barrier()
        return bench.seconds(run)

    found = [least_s(partial(once, run), repeats) for _, run in exchanges]
    seconds = torch.tensor(found, device=device)
    dist.all_reduce(seconds, dist.ReduceOp.MAX)
    return float(seconds.sum())

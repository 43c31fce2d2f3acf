"""CPU helpers: ranks without a device of their own that sum gradients of those that train (BytePS).

The last ranks of the process group are helpers, the others workers. Every rank makes the same
exchange of the same model. Workers bring their gradients after each backward; helpers `serve` until
all workers are done. A step is two uneven all-to-alls with a sum between them: each part of the
gradients goes to the rank that owns it by the planner's shares, and its sum to every worker.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from itertools import accumulate
from types import TracebackType
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from cotrain_compile.cluster.cpu_helpers import (
    CHUNK_BYTES,
    Chunk,
    Sharing,
    chunks_of,
    sent_bytes,
    share,
)
from cotrain_compile.distribute.meet import LONGEST, first_line, meeting_of, timeout_of
from cotrain_compile.errors import DistributeError, ExchangeFailed, OptionError, RanksApart


class _Does(IntEnum):
    """What a rank tells the others before each exchange."""

    HELP = 0
    SUM = 1
    STOP = 2
    FAIL = 3


@dataclass(frozen=True)
class _Flat:
    """All gradients of one type behind one another, and who owns which elements of them."""

    dtype: torch.dtype
    params: tuple[tuple[str, nn.Parameter], ...]
    sharing: Sharing
    chunks: tuple[Chunk, ...]

    @property
    def owned(self) -> list[int]:
        """How many elements each rank sums."""
        counts = [0] * (self.sharing.machines + self.sharing.helpers)
        for chunk in self.chunks:
            counts[chunk.owner] += chunk.nbytes // self.dtype.itemsize
        return counts

    def pieces(self) -> list[tuple[int, nn.Parameter, slice]]:
        """The elements of parameters, with their owners, those of one owner next to each other."""
        by_name = dict(self.params)
        size = self.dtype.itemsize
        return [
            (
                chunk.owner,
                by_name[chunk.layer],
                slice(chunk.begin // size, (chunk.begin + chunk.nbytes) // size),
            )
            for chunk in sorted(self.chunks, key=lambda chunk: chunk.owner)
        ]


class HelpedExchange:
    """The gradients of workers, summed on workers and helpers; `sent_bytes` of this rank so far.

    A context manager: leaving it lets helpers stop, or tells all ranks that this one has failed.
    """

    def __init__(
        self, model: nn.Module, helpers: int, helper_rate: float, chunk_bytes: int
    ) -> None:
        self.workers = dist.get_world_size() - helpers
        self.helpers = helpers
        self.rank = dist.get_rank()
        self.sent_bytes = 0
        self._flats = _flats(model, self.workers, helpers, helper_rate, chunk_bytes)
        ranks = tuple(range(self.workers + helpers))
        wait = min(LONGEST, timeout_of(dist.group.WORLD))
        meeting_of(ranks).meet(
            f"helpers {helpers} {[(flat.dtype, flat.chunks) for flat in self._flats]}",
            lambda: (
                f"has {helpers} helpers of rate {helper_rate} and a model of "
                f"{sum(param.numel() for param in model.parameters())} parameters"
            ),
        )
        self._group: Any = dist.new_group(backend="gloo", timeout=wait)
        among = dist.new_group(list(ranks[: self.workers]), backend="gloo", timeout=wait)
        if not self.helps:
            _start_equal(model, among)

    @property
    def helps(self) -> bool:
        """Whether this rank is a helper."""
        return self.rank >= self.workers

    @property
    def planned_bytes(self) -> int:
        """What this rank sends in each exchange, by the planner."""
        return sum(sent_bytes(flat.chunks, flat.sharing)[self.rank] for flat in self._flats)

    def average_gradients(self) -> None:
        """Every gradient becomes its mean over the workers; called by each of them after backward.

        Raises `RanksApart` on all ranks where one has failed or is done, `ExchangeFailed` where one
        has died.
        """
        if self.helps:
            raise DistributeError("this rank is a helper: let it call serve(), and train nothing")
        for flat in self._flats:
            for name, param in flat.params:
                if param.grad is None or param.grad.layout != torch.strided:
                    raise DistributeError(
                        f"parameter {name} has no dense gradient on this rank, and all workers sum "
                        "the same ones; use it in the loss, or requires_grad_(False) before "
                        "cpu_helpers"
                    )
        self._tell(_Does.SUM)
        for flat in self._flats:
            self._sum(flat)

    def serve(self) -> None:
        """Sum gradients until all workers are done; called by each helper."""
        if not self.helps:
            raise DistributeError("this rank is a worker: it trains, and calls average_gradients()")
        while self._tell(_Does.HELP) is _Does.SUM:
            for flat in self._flats:
                self._sum(flat)

    def __enter__(self) -> HelpedExchange:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if error is None:
            if not self.helps:
                self._tell(_Does.STOP)
        elif not isinstance(error, RanksApart | ExchangeFailed):
            try:
                self._tell(_Does.FAIL)
            except RanksApart:
                pass  # what all ranks are told of this one
            except ExchangeFailed as lost:
                error.add_note(f"The other ranks could not be told: {lost}")

    def _tell(self, does: _Does) -> _Does:
        """What all workers do next; raises where they do different things."""
        own = torch.tensor([does])
        found = [torch.empty_like(own) for _ in range(self.workers + self.helpers)]
        try:
            dist.all_gather(found, own, group=self._group)
        except RuntimeError as error:
            raise _lost(error) from error
        each = [_Does(int(value)) for value in found]
        failed = [rank for rank, other in enumerate(each) if other is _Does.FAIL]
        if failed:
            raise RanksApart(
                f"rank {failed[0]} has failed, so no rank goes on; look at its error, and start "
                "all ranks again from a checkpoint"
            )
        if len(set(each[: self.workers])) > 1:
            done = [rank for rank, other in enumerate(each) if other is _Does.STOP]
            raise RanksApart(
                f"ranks {done} are done and others have gradients to sum; give every worker as "
                "many batches"
            )
        return each[0]

    def _sum(self, flat: _Flat) -> None:
        owned, n, k = flat.owned, self.workers, self.helpers
        mine, dtype = owned[self.rank], flat.dtype
        pieces = flat.pieces()
        begins = [0, *accumulate(part.stop - part.start for _, _, part in pieces)]
        own = torch.empty(0 if self.helps else sum(owned), dtype=dtype)  # on the host
        if not self.helps:
            for (_, param, part), begin in zip(pieces, begins[:-1], strict=True):
                assert param.grad is not None
                own[begin : begin + part.stop - part.start] = param.grad.flatten()[part]
        received = torch.empty(n * mine, dtype=dtype)
        to_owners = [0] * (n + k) if self.helps else owned
        from_workers = [mine] * n + [0] * k
        self._all_to_all(received, own, from_workers, to_owners)
        # Terms come in the order of ranks, and each sum is made once: all workers get equal bits.
        total = received.view(n, mine).sum(0, dtype=dtype)
        self._all_to_all(own, total.repeat(n), to_owners, from_workers)
        if self.helps:
            return
        own /= n
        with torch.no_grad():
            for (_, param, part), begin in zip(pieces, begins[:-1], strict=True):
                assert param.grad is not None
                if not param.grad.is_contiguous():
                    param.grad = param.grad.contiguous()
                param.grad.view(-1)[part] = own[begin : begin + part.stop - part.start].to(
                    param.grad.device
                )

    def _all_to_all(
        self, output: torch.Tensor, given: torch.Tensor, out: list[int], sent: list[int]
    ) -> None:
        try:
            dist.all_to_all_single(output, given, out, sent, group=self._group)
        except RuntimeError as error:
            raise _lost(error) from error
        self.sent_bytes += (sum(sent) - sent[self.rank]) * given.element_size()


def cpu_helpers(
    model: nn.Module,
    helpers: int,
    *,
    helper_rate: float = 1.0,
    chunk_bytes: int = CHUNK_BYTES,
) -> HelpedExchange:
    """An exchange of gradients in which the last `helpers` ranks sum those of the others.

    Every rank calls it with the same model; helpers may have it on the meta device. Workers start
    with what rank 0 holds. `helper_rate` is how many times as fast the network of a helper is.
    """
    if not dist.is_available() or not dist.is_initialized():
        raise DistributeError(
            "no process group is initialised: start with torchrun, and call "
            "torch.distributed.init_process_group before cpu_helpers"
        )
    if chunk_bytes < 8 or chunk_bytes % 8:
        raise OptionError(f"chunk_bytes must be a multiple of 8, not {chunk_bytes}")
    return HelpedExchange(model, helpers, helper_rate, chunk_bytes)


def _flats(
    model: nn.Module, workers: int, helpers: int, helper_rate: float, chunk_bytes: int
) -> tuple[_Flat, ...]:
    by_type: defaultdict[torch.dtype, list[tuple[str, nn.Parameter]]] = defaultdict(list)
    for name, param in model.named_parameters():
        if param.requires_grad and param.numel():
            by_type[param.dtype].append((name, param))
    if not by_type:
        raise DistributeError("the model has no parameters to train")
    flats = []
    for dtype, params in by_type.items():
        sizes = [(name, param.numel() * dtype.itemsize) for name, param in params]
        sharing = share(workers, helpers, sum(size for _, size in sizes), 1.0, helper_rate)
        chunks = chunks_of(sizes, sharing, chunk_bytes)
        flats.append(_Flat(dtype, tuple(params), sharing, chunks))
    return tuple(flats)


def _start_equal(model: nn.Module, workers: Any) -> None:
    """Parameters and buffers become those of rank 0, as DistributedDataParallel does it."""
    held: Sequence[torch.Tensor] = (*model.parameters(), *model.buffers())
    with torch.no_grad():
        for tensor in held:
            staged = tensor.detach().cpu().contiguous()
            dist.broadcast(staged, 0, group=workers)
            tensor.copy_(staged)


def _lost(error: BaseException) -> ExchangeFailed:
    return ExchangeFailed(
        f"another rank has died, hangs, or did not come to this exchange: {first_line(error)}. "
        "Look at the first error of the other ranks; start all ranks again from a checkpoint"
    )

"""CPU helpers: ranks without a device of their own that sum gradients of those that train (BytePS).

The last ranks of the process group are helpers, the others workers. Every rank makes the same
exchange of the same model. Workers bring their gradients after each backward; helpers `serve` until
all workers are done. Gradients go in rounds, each of two uneven all-to-alls with a sum between:
each part goes to the rank that owns it by the planner's shares, and its sum to every worker. While
sums of a round come back, gradients of the next one go to their owners, so that network cards send
and receive at once, as the planner's figures have it. Rounds are of the last parameters first, as a
backward makes their gradients, so that all but the last rounds can go on beside it.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from enum import IntEnum
from types import TracebackType
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from cotrain_compile.cluster.helpers import (
    CHUNK_BYTES,
    Chunk,
    Sharing,
    chunks_of,
    sent_bytes,
    share,
)
from cotrain_compile.distribute.meet import LONGEST, first_line, meeting_of, timeout_of
from cotrain_compile.distribute.ranks import calls_in_order
from cotrain_compile.errors import DistributeError, ExchangeFailed, OptionError, RanksApart

# In the first half of the first round, and in the second half of the last, helpers only receive or
# only send: with so many rounds an exchange takes an eighth longer than the planner's.
ROUNDS = 8


class _Does(IntEnum):
    """What a rank tells the others before each exchange."""

    HELP = 0
    SUM = 1
    STOP = 2
    FAIL = 3


@dataclass(frozen=True)
class _Flat:
    """Gradients of one type that go in a round, and who owns which elements of them."""

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

    @property
    def exchanged(self) -> list[nn.Parameter]:
        """The parameters of which some elements go in this round."""
        by_name = dict(self.params)
        return [by_name[name] for name in dict.fromkeys(chunk.layer for chunk in self.chunks)]

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


@dataclass(frozen=True)
class _UnderWay:
    """An all-to-all that has begun, with what it reads and writes."""

    flat: _Flat
    given: torch.Tensor
    output: torch.Tensor
    work: Any

    def wait(self) -> torch.Tensor:
        """What came."""
        try:
            self.work.wait()
        except RuntimeError as error:
            raise _lost(error) from error
        return self.output


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
        self._is_under_way = False
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
        self._refuse_helper()
        self._refuse_missing()
        self._tell(_Does.SUM)
        self._sum()

    @contextmanager
    def beside_backward(self) -> Iterator[None]:
        """Within it, the backward of a step's last micro-batch; then gradients are means.

        Rounds of the exchange begin as soon as all workers have their gradients. Raises as
        `average_gradients` does, also from within `backward()`. A worker whose backward fails when
        the exchange has begun cannot tell the others: they are told by their timeout.
        """
        self._refuse_helper()
        rounds = self._rounds()

        def begin_next() -> None:
            if not self._is_under_way:
                self._tell(_Does.SUM)
                self._is_under_way = True
            next(rounds)

        with calls_in_order([flat.exchanged for flat in self._flats], begin_next):
            yield
        self._refuse_missing()
        if not self._is_under_way:
            self._tell(_Does.SUM)
        for _ in rounds:
            pass
        self._is_under_way = False

    def _refuse_helper(self) -> None:
        if self.helps:
            raise DistributeError("this rank is a helper: let it call serve(), and train nothing")

    def _refuse_missing(self) -> None:
        for flat in self._flats:
            for name, param in flat.params:
                if param.grad is None or param.grad.layout != torch.strided:
                    raise DistributeError(
                        f"parameter {name} has no dense gradient on this rank, and all workers sum "
                        "the same ones; use it in the loss, or requires_grad_(False) before "
                        "cpu_helpers"
                    )

    def serve(self) -> None:
        """Sum gradients until all workers are done; called by each helper."""
        if not self.helps:
            raise DistributeError("this rank is a worker: it trains, and calls average_gradients()")
        while self._tell(_Does.HELP) is _Does.SUM:
            self._sum()

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
        elif not (isinstance(error, RanksApart | ExchangeFailed) or self._is_under_way):
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

    def _sum(self) -> None:
        """All rounds."""
        for _ in self._rounds():
            pass

    def _rounds(self) -> Iterator[None]:
        """Each begins to go, and sums of the one before come back meanwhile."""
        before: _UnderWay | None = None
        coming: list[_UnderWay] = []
        for flat in self._flats:
            came = None if before is None else before.wait()
            going = self._to_owners(flat)
            if before is not None and came is not None:
                coming.append(self._to_workers(before.flat, came))
                if len(coming) > 1:
                    self._keep(coming.pop(0))
            before = going
            yield
        assert before is not None  # a model has parameters
        coming.append(self._to_workers(before.flat, before.wait()))
        for sums in coming:
            self._keep(sums)

    def _to_owners(self, flat: _Flat) -> _UnderWay:
        """Gradients of a round begin to go."""
        pieces = [] if self.helps else flat.pieces()
        own = torch.empty(sum(part.stop - part.start for _, _, part in pieces), dtype=flat.dtype)
        begin = 0
        for _, param, part in pieces:  # they are staged on the host
            assert param.grad is not None
            end = begin + part.stop - part.start
            own[begin:end] = param.grad.flatten()[part]
            begin = end
        mine, to_owners = self._counts(flat)
        return self._begin(flat, own, received=mine, sent=to_owners)

    def _to_workers(self, flat: _Flat, came: torch.Tensor) -> _UnderWay:
        """Sums of the gradients that came begin to go back.

        Terms come in the order of ranks, and each sum is made once: all workers get equal bits.
        """
        mine, to_owners = self._counts(flat)
        total = came.view(self.workers, len(came) // self.workers).sum(0, dtype=flat.dtype)
        return self._begin(flat, total.repeat(self.workers), received=to_owners, sent=mine)

    def _keep(self, coming: _UnderWay) -> None:
        """When sums have come a worker has their means as gradients."""
        sums = coming.wait()
        if self.helps:
            return
        sums /= self.workers
        begin = 0
        with torch.no_grad():
            for _, param, part in coming.flat.pieces():
                assert param.grad is not None
                if not param.grad.is_contiguous():
                    param.grad = param.grad.contiguous()
                end = begin + part.stop - part.start
                param.grad.view(-1)[part] = sums[begin:end].to(param.grad.device)
                begin = end

    def _counts(self, flat: _Flat) -> tuple[list[int], list[int]]:
        """Elements that each worker has of what this rank sums, and each owner of this worker's."""
        owned, none = flat.owned, [0] * (self.workers + self.helpers)
        mine = [owned[self.rank]] * self.workers + none[self.workers :]
        return mine, none if self.helps else owned

    def _begin(
        self, flat: _Flat, given: torch.Tensor, received: list[int], sent: list[int]
    ) -> _UnderWay:
        output = torch.empty(sum(received), dtype=flat.dtype)
        try:
            work = dist.all_to_all_single(
                output, given, received, sent, group=self._group, async_op=True
            )
        except RuntimeError as error:
            raise _lost(error) from error
        self.sent_bytes += (sum(sent) - sent[self.rank]) * given.element_size()
        return _UnderWay(flat, given, output, work)


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
    for name, param in reversed(list(model.named_parameters())):
        if param.requires_grad and param.numel():
            by_type[param.dtype].append((name, param))
    if not by_type:
        raise DistributeError("the model has no parameters to train")
    flats = []
    for dtype, params in by_type.items():
        sizes = [(name, param.numel() * dtype.itemsize) for name, param in params]
        sharing = share(workers, helpers, sum(size for _, size in sizes), 1.0, helper_rate)
        chunks = chunks_of(sizes, sharing, chunk_bytes)
        rounds = max(1, min(ROUNDS, sum(chunk.nbytes for chunk in chunks) // chunk_bytes))
        each = math.ceil(len(chunks) / rounds)
        flats += [
            _Flat(dtype, tuple(params), sharing, chunks[first : first + each])
            for first in range(0, len(chunks), each)
        ]
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

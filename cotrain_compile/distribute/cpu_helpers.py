"""CPU helpers: ranks without a device of their own that sum gradients of those that train (BytePS).

The last ranks of the process group are helpers, the others workers. Every rank makes the same
exchange of the same model. Workers bring their gradients after each backward; helpers `serve` until
all workers are done. Gradients go in rounds, each of two uneven all-to-alls with a sum between:
each part goes to the rank that owns it by the planner's shares, and its sum to every worker. While
sums of a round come back, gradients of the next one go to their owners, so that network cards send
and receive at once, as the planner's figures have it. Rounds are of the last parameters first, as a
backward makes their gradients, so that all but the last rounds can go on beside it.

Where a machine has several workers, they add up a round among themselves first, and one of them,
each in turn, brings it and gives them the sums that come back: what leaves a machine is one copy.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from enum import IntEnum
from types import TracebackType
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from cotrain_compile.cluster.helpers import CHUNK_BYTES, sent_bytes
from cotrain_compile.distribute.helped_rounds import (
    Flat,
    Places,
    UnderWay,
    lost_ranks,
    rounds_of,
)
from cotrain_compile.distribute.meet import LONGEST, meeting_of, timeout_of
from cotrain_compile.distribute.ranks import calls_in_order
from cotrain_compile.distribute.updates_ahead import MakeOptimizer, UpdatesAhead, needed_first
from cotrain_compile.errors import DistributeError, ExchangeFailed, OptionError, RanksApart


class _Does(IntEnum):
    """What a rank tells the others before each exchange."""

    HELP = 0
    SUM = 1
    STOP = 2
    FAIL = 3
    SUM_AHEAD = 4  # those that the next forward needs first come first


class HelpedExchange:
    """The gradients of workers, summed on workers and helpers; `sent_bytes` of this rank so far.

    A context manager: leaving it lets helpers stop, or tells all ranks that this one has failed.
    """

    def __init__(
        self,
        model: nn.Module,
        helpers: int,
        helper_rate: float,
        chunk_bytes: int,
        devices_a_machine: int,
    ) -> None:
        self.workers = dist.get_world_size() - helpers
        self.helpers = helpers
        self.rank = dist.get_rank()
        self.sent_bytes = 0
        self._is_under_way = False
        self._ahead: UpdatesAhead | None = None
        if self.workers % devices_a_machine:
            raise OptionError(
                f"{self.workers} workers are not on machines of {devices_a_machine} devices each; "
                "start as many on each machine, helpers behind all of them"
            )
        machines = self.workers // devices_a_machine
        self._places = Places(machines, devices_a_machine, helpers)
        self._flats = rounds_of(model, machines, helpers, helper_rate, chunk_bytes)
        ranks = tuple(range(self.workers + helpers))
        wait = min(LONGEST, timeout_of(dist.group.WORLD))
        meeting_of(ranks).meet(
            f"{self._places} {[(flat.dtype, flat.chunks) for flat in self._flats]}",
            lambda: (
                f"has {helpers} helpers of rate {helper_rate}, {devices_a_machine} devices a "
                f"machine, and a model of "
                f"{sum(param.numel() for param in model.parameters())} parameters"
            ),
        )
        self._group: Any = dist.new_group(backend="gloo", timeout=wait)
        among = dist.new_group(list(ranks[: self.workers]), backend="gloo", timeout=wait)
        self._carrying, self._machine = self._groups(list(ranks[self.workers :]), wait)
        if not self.helps:
            _start_equal(model, among)

    def _groups(self, helpers: list[int], wait: Any) -> tuple[list[Any], Any]:
        """Those that carry rounds, by their numbers, and that of this rank's machine."""
        places = self._places
        if places.each == 1:
            return [self._group], None
        carrying = [
            dist.new_group([*places.carriers(number), *helpers], backend="gloo", timeout=wait)
            for number in range(places.each)
        ]
        machines = [
            dist.new_group(places.machine(number), backend="gloo", timeout=wait)
            for number in range(places.machines)
        ]
        return carrying, None if self.helps else machines[places.of_rank(self.rank)]

    @property
    def helps(self) -> bool:
        """Whether this rank is a helper."""
        return self.rank >= self.workers

    @property
    def planned_bytes(self) -> int:
        """What this rank sends in each exchange, by the planner."""
        place = self._places.of_rank(self.rank)
        own = filter(self._carries, self._flats)
        return sum(sent_bytes(flat.chunks, flat.sharing)[place] for flat in own)

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

    @contextmanager
    def ahead_of_forward(self, model: nn.Module, optimizers: MakeOptimizer) -> Iterator[None]:
        """Within it, the backward of a step's last micro-batch; the model is updated by then, or
        when the next forward comes to each of its layers (`updates_ahead`).

        `optimizers` makes one of a parameter, once; gradients are gone when it has updated. What is
        left when the exchange ends is done then; call `finish_updates` before anything else reads
        parameters. Raises as `beside_backward`, and `DistributeError` where a parameter was not
        read by its own module in this forward.
        """
        self._refuse_helper()
        order = needed_first(self._flats)
        if self._ahead is None:
            self._ahead = UpdatesAhead(model, optimizers, self._flats)
        self._ahead.begin()
        rounds = self._rounds(order, self._ahead.kept)
        begun = 0

        def begin_next() -> None:
            nonlocal begun
            if not begun:
                self._tell(_Does.SUM_AHEAD)
                self._is_under_way = True
            begun += 1
            next(rounds)

        half = [flat.exchanged for flat in order[: len(order) // 2]]
        with calls_in_order(half, begin_next):
            yield
        self._refuse_missing()
        if not begun:
            self._tell(_Does.SUM_AHEAD)
        self._ahead.begun(rounds)

    def finish_updates(self) -> None:
        """All parameters have the updates of the last backward after it."""
        if self._ahead is not None:
            self._ahead.finish()
            self._is_under_way = False

    def _refuse_helper(self) -> None:
        if self.helps:
            raise DistributeError("this rank is a helper: let it call serve(), and train nothing")

    def _refuse_missing(self) -> None:
        for flat in self._flats:
            for name, param in flat.params:
                if self._ahead is not None and self._ahead.has_updated(param):
                    continue
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
        while (does := self._tell(_Does.HELP)) is not _Does.STOP:
            order = needed_first(self._flats) if does is _Does.SUM_AHEAD else self._flats
            for _ in self._rounds(order):
                pass

    def __enter__(self) -> HelpedExchange:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if error is None:
            self.finish_updates()
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
        with lost_ranks():
            dist.all_gather(found, own, group=self._group)
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

    def _rounds(
        self, order: Sequence[Flat] = (), kept: Callable[[Flat], None] | None = None
    ) -> Iterator[None]:
        """Each begins to go, and sums of the one before come back meanwhile. `kept` is called where
        a worker has means of one."""
        before: UnderWay | None = None
        coming: list[UnderWay] = []
        for flat in order or self._flats:
            came = None if before is None else before.wait()
            going = self._to_owners(flat)
            if before is not None and came is not None:
                coming.append(self._to_workers(before.flat, came))
                if len(coming) > 1:
                    self._keep(coming.pop(0), kept)
            before = going
            yield
        assert before is not None  # a model has parameters
        coming.append(self._to_workers(before.flat, before.wait()))
        for sums in coming:
            self._keep(sums, kept)
            yield

    def _to_owners(self, flat: Flat) -> UnderWay:
        """Gradients of a round begin to go."""
        pieces = [] if self.helps else flat.pieces()
        own = torch.empty(sum(part.stop - part.start for _, _, part in pieces), dtype=flat.dtype)
        begin = 0
        for _, param, part in pieces:  # they are staged on the host
            assert param.grad is not None
            end = begin + part.stop - part.start
            own[begin:end] = param.grad.flatten()[part]
            begin = end
        if self._machine is not None:
            with lost_ranks():
                dist.reduce(own, self._carrier(flat), group=self._machine)
        mine, to_owners = self._counts(flat)
        return self._begin(flat, own, received=mine, sent=to_owners)

    def _to_workers(self, flat: Flat, came: torch.Tensor) -> UnderWay:
        """Sums of the gradients that came begin to go back.

        Terms come in the order of ranks, and each sum is made once: all workers get equal bits.
        """
        mine, to_owners = self._counts(flat)
        machines = self._places.machines
        total = came.view(machines, len(came) // machines).sum(0, dtype=flat.dtype)
        return self._begin(flat, total.repeat(machines), received=to_owners, sent=mine)

    def _keep(self, coming: UnderWay, kept: Callable[[Flat], None] | None) -> None:
        """When sums have come a worker has their means as gradients."""
        sums = coming.wait()
        if self.helps:
            return
        sums /= self.workers
        if self._machine is not None:
            with lost_ranks():
                dist.broadcast(sums, self._carrier(coming.flat), group=self._machine)
        begin = 0
        with torch.no_grad():
            for _, param, part in coming.flat.pieces():
                assert param.grad is not None
                if not param.grad.is_contiguous():
                    param.grad = param.grad.contiguous()
                end = begin + part.stop - part.start
                param.grad.view(-1)[part] = sums[begin:end].to(param.grad.device)
                begin = end
        if kept is not None:
            kept(coming.flat)

    def _counts(self, flat: Flat) -> tuple[list[int], list[int]]:
        """Elements that each worker has of what this rank sums, and each owner of this worker's."""
        machines = self._places.machines
        owned, none = flat.owned, [0] * (machines + self.helpers)
        mine = [owned[self._places.of_rank(self.rank)]] * machines + none[machines:]
        return mine, none if self.helps else owned

    def _carries(self, flat: Flat) -> bool:
        """Whether this rank brings it, or helps."""
        return self.helps or self.rank == self._carrier(flat)

    def _carrier(self, flat: Flat) -> int:
        """The rank of this machine that brings a round."""
        return self._places.carriers(flat.number)[self._places.of_rank(self.rank)]

    def _begin(
        self, flat: Flat, given: torch.Tensor, received: list[int], sent: list[int]
    ) -> UnderWay:
        output = torch.empty(sum(received), dtype=flat.dtype)
        if not self._carries(flat):
            return UnderWay(flat, given, output, None)
        group = self._carrying[flat.number % self._places.each]
        with lost_ranks():
            work = dist.all_to_all_single(output, given, received, sent, group=group, async_op=True)
        kept = sent[self._places.of_rank(self.rank)]
        self.sent_bytes += (sum(sent) - kept) * given.element_size()
        return UnderWay(flat, given, output, work)


def cpu_helpers(
    model: nn.Module,
    helpers: int,
    *,
    helper_rate: float = 1.0,
    chunk_bytes: int = CHUNK_BYTES,
    devices_a_machine: int = 1,
) -> HelpedExchange:
    """An exchange of gradients in which the last `helpers` ranks sum those of the others.

    Every rank calls it with the same model; helpers may have it on the meta device. Workers start
    with what rank 0 holds. `helper_rate` is how many times as fast the network of a helper is.
    Workers next to each other, as many as `devices_a_machine` says, are on one machine.
    """
    if not dist.is_available() or not dist.is_initialized():
        raise DistributeError(
            "no process group is initialised: start with torchrun, and call "
            "torch.distributed.init_process_group before cpu_helpers"
        )
    if chunk_bytes < 8 or chunk_bytes % 8:
        raise OptionError(f"chunk_bytes must be a multiple of 8, not {chunk_bytes}")
    if devices_a_machine < 1:
        raise OptionError(f"devices_a_machine must be at least 1, not {devices_a_machine}")
    return HelpedExchange(model, helpers, helper_rate, chunk_bytes, devices_a_machine)


def _start_equal(model: nn.Module, workers: Any) -> None:
    """Parameters and buffers become those of rank 0, as DistributedDataParallel does it."""
    held: Sequence[torch.Tensor] = (*model.parameters(), *model.buffers())
    with torch.no_grad():
        for tensor in held:
            staged = tensor.detach().cpu().contiguous()
            dist.broadcast(staged, 0, group=workers)
            tensor.copy_(staged)

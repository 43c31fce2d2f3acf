"""Turn works: what devices do whose stages have their turns one behind the other.

In: a `Draft`, which is packs on a server and micro-batches of a size. Out: its works for the
simulator's engine, and what each device holds. A stage runs all of its micro-batches back to back:
a *stay*. What comes and goes when a stay begins is what `pipelining.swapped` does then.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

from cotrain_compile.cluster.harmony_lanes import Server
from cotrain_compile.cluster.harmony_packs import PackCosts, Packs
from cotrain_compile.placement.simulate.engine import Work


@dataclass(frozen=True)
class Stay:
    """Turns of stage `k` with all micro-batches: its forwards, its backwards, or both at once.

    `again` where its parameters were there before.
    """

    k: int
    forward: bool
    backward: bool
    again: bool = False

    @property
    def parameters(self) -> str:
        """The work that brings them."""
        return f"parameters of stage {self.k}{' again' if self.again else ''}"

    @property
    def gradients(self) -> str:
        """The work that takes them home."""
        return f"gradients of stage {self.k}"

    def turn(self, i: int) -> str:
        """The work of a micro-batch."""
        return f"{'forward' if self.forward else 'backward'} {i} of stage {self.k}"

    def order(self, micro_batches: int) -> list[int]:
        """The micro-batches as they have their turns."""
        numbers = list(range(micro_batches))
        return numbers if self.forward else numbers[::-1]

    def enters(self, i: int) -> tuple[str, ...]:
        """What brings what a turn begins with."""
        if not self.forward:
            return (f"gradients {i} to stage {self.k}",)
        return (f"activations {i} to stage {self.k}",) if self.k else ()


@dataclass(frozen=True)
class Draft:
    """Packs with micro-batches of a size; the k-th pack is on device k mod the devices."""

    costs: PackCosts
    server: Server
    packs: Packs
    each: int
    micro_batches: int
    ahead: bool = False

    def packs_of(self, device: int) -> list[int]:
        """The stages of a device."""
        return list(range(device, len(self.packs), self.server.devices))

    def stays(self, device: int) -> list[Stay]:
        """Forwards of its stages, and backwards in reverse; those of the loss are one."""
        own = self.packs_of(device)
        forth = [Stay(k, forward=True, backward=False) for k in own]
        back = [Stay(k, forward=False, backward=True, again=True) for k in reversed(own)]
        if own[-1] == len(self.packs) - 1:
            forth[-1:] = [Stay(own[-1], forward=True, backward=True)]
            del back[0]
        return forth + back

    @cached_property
    def peak_bytes(self) -> tuple[int, ...]:
        """What each device holds: the fullest of its stays, beside what enters and leaves."""
        return tuple(map(self._peak, range(self.server.devices)))

    def _peak(self, device: int) -> int:
        own = [self.packs[k] for k in self.packs_of(device)]
        ends = sum(
            self.costs.input_bytes(self.each, layer)
            for pack in own
            for layer in (pack.first, pack.last)
            if layer  # what the first stage reads is the batch, and has no gradient
        )
        stays = self.stays(device)
        most = max(self._stay_bytes(stays, i) for i in range(len(stays)))
        return round(most + 2 * self.micro_batches * ends)

    def _stay_bytes(self, stays: Sequence[Stay], i: int) -> float:
        """What a turn takes, and what comes and goes beside it."""
        of_turn = (
            self.costs.backward_peak_bytes if stays[i].backward else self.costs.forward_peak_bytes
        )
        beside = [*_next(stays, i), *_gone(stays, i - 1)] if self.ahead else []
        return of_turn(self.each, self.packs[stays[i].k]) + sum(
            self.costs.weight_bytes(self.packs[stay.k]) for stay in beside
        )

    @cached_property
    def least_s(self) -> float:
        """No step takes less: a device with all its turns, and the way there and back.

        A device begins when a micro-batch has passed the stages before its first one; behind its
        last turn the backward goes through these. Then gradients go home, and all update.
        """
        devices = range(self.server.devices)
        first_s = self._swap_s(self.stays(0)[0])
        least_s, way_s = 0.0, first_s if self.ahead else 0.0
        for device in devices:
            stays = self.stays(device)
            busy_s = self.micro_batches * sum(map(self._turn_s, stays))
            there, back = Stay(device, True, False), Stay(device, False, True)
            passing_s = self._turn_s(there) + self._turn_s(back)
            if not self.ahead:
                passing_s += self._swap_s(there)
                for i in range(len(stays)):
                    swapped = (*_gone(stays, i - 1), *self._coming(stays, i))
                    busy_s += sum(map(self._swap_s, swapped))
            least_s = max(least_s, way_s + busy_s)
            way_s += passing_s
        return least_s + first_s + max(map(self._update_s, devices))

    def works(self) -> Iterator[Work]:
        """Those of all devices."""
        for device in range(self.server.devices):
            yield from self.works_of(device)

    def works_of(self, device: int) -> Iterator[Work]:
        """What the device does, in its order, what comes and goes, and what it sends."""
        stays = self.stays(device)
        if self.ahead:
            yield self._fetch(stays[0], device, ())
        for i, stay in enumerate(stays):
            first = stay.order(self.micro_batches)[0]
            begins = (*stay.enters(first), *self._left(stays, i))
            yield from self._swaps(stays, i, device, begins)
            yield from self._turns(stay, device, begins)
        yield self._go_home(stays[-1], device, self._left(stays, len(stays)))
        ends = tuple(f"gradients of stage {d}" for d in range(self.server.devices))
        yield Work(f"update of device {device}", _lane(device), self._update_s(device), ends)

    def _left(self, stays: Sequence[Stay], i: int) -> tuple[str, ...]:
        """What has to be over when stay `i` begins: the turns before it, and gradients on the way.

        So no more is on the device than what `_stay_bytes` counts.
        """
        ended = [stay.turn(stay.order(self.micro_batches)[-1]) for stay in stays[:i][-1:]]
        return (*ended, *(stay.gradients for stay in _gone(stays, i - 2)))

    def _swaps(
        self, stays: Sequence[Stay], i: int, device: int, begins: tuple[str, ...]
    ) -> Iterator[Work]:
        """What goes home and what comes when stay `i` begins."""
        for stay in _gone(stays, i - 1):
            yield self._go_home(stay, device, begins)
        for stay in self._coming(stays, i):
            yield self._fetch(stay, device, begins)

    def _coming(self, stays: Sequence[Stay], i: int) -> Sequence[Stay]:
        """Whose parameters begin to come when stay `i` begins."""
        if i and stays[i - 1].k == stays[i].k:
            return ()  # the stage is there, and what comes after it is on its way
        return _next(stays, i) if self.ahead else stays[i : i + 1]

    def _turns(self, stay: Stay, device: int, begins: tuple[str, ...]) -> Iterator[Work]:
        k, pack = stay.k, self.packs[stay.k]
        seconds = self._turn_s(stay)
        # Parameters that were there before stay from the forwards to the backwards, or come again.
        fetched = () if stay.again and k == self.packs_of(device)[-1] else (stay.parameters,)
        after, order = (*begins, *fetched), stay.order(self.micro_batches)
        for i in order:
            made = stay.turn(i)
            yield Work(made, _lane(device), seconds, (*after, *stay.enters(i)))
            after = ()
            if not stay.backward:
                yield self._send(
                    f"activations {i} to stage {k + 1}", pack.last, device, k + 1, made
                )
            elif not stay.forward:
                yield from self._send_back(stay, i, device, made)
        if stay.forward and stay.backward:  # the schedule sends when all are done
            for i in reversed(order):
                yield from self._send_back(stay, i, device, stay.turn(order[-1]))

    def _send_back(self, stay: Stay, i: int, device: int, made: str) -> Iterator[Work]:
        k = stay.k
        if k:
            name = f"gradients {i} to stage {k - 1}"
            yield self._send(name, self.packs[k].first, device, k - 1, made)

    def _fetch(self, stay: Stay, device: int, after: tuple[str, ...]) -> Work:
        lane = f"{_lane(device)}/swap in" if self.ahead else _lane(device)
        return Work(stay.parameters, lane, self._swap_s(stay), after)

    def _go_home(self, stay: Stay, device: int, after: tuple[str, ...]) -> Work:
        lane = f"{_lane(device)}/swap out" if self.ahead else _lane(device)
        return Work(stay.gradients, lane, self._swap_s(stay), after)

    def _turn_s(self, stay: Stay) -> float:
        """A backward makes its forward again, or is one with it."""
        pack = self.packs[stay.k]
        forward_s = self.costs.forward_s(self.each, pack)
        return forward_s + (self.costs.backward_s(self.each, pack) if stay.backward else 0.0)

    def _update_s(self, device: int) -> float:
        own = [self.packs[k] for k in self.packs_of(device)]
        return self.server.update_s(sum(map(self.costs.update_s, own)), shared=True)

    def _swap_s(self, stay: Stay) -> float:
        share = self.server.swap_bytes_per_s / self.server.devices
        rate = min(self.server.link_bytes_per_s, share)
        return self.costs.weight_bytes(self.packs[stay.k]) / rate

    def _send(self, name: str, layer: int, device: int, to: int, made: str) -> Work:
        nbytes = self.costs.input_bytes(self.each, layer)
        there = to % self.server.devices
        seconds = 0.0 if there == device else nbytes / self.server.peer_bytes_per_s
        return Work(name, f"device{device} to device{there}", seconds, (made,))


def _next(stays: Sequence[Stay], i: int) -> Sequence[Stay]:
    """The first stay after `i` that is of another stage, if there is one."""
    return [stay for stay in stays[i + 1 :] if stay.k != stays[i].k][:1]


def _gone(stays: Sequence[Stay], i: int) -> Sequence[Stay]:
    """Stay `i`, if there is one that leaves gradients."""
    return [stay for stay in stays[max(0, i) : max(0, i + 1)] if stay.backward]


def _lane(device: int) -> str:
    return f"device{device}"

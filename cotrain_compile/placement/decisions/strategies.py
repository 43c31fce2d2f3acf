"""Strategies: what can be done with a cluster of parameters, and all that follows from doing it.

A strategy says which clusters it fits, its `Effect` on memory, links and processors, what it writes
into a `Placement`, and its words. Nothing else in `placement/` tells one strategy from another: the
greedy, the integer program and the bound read effects, `moves_of` the placement, and `strategy_of`
finds the strategy again by comparing placements. A new one is of this kind in the list at the end;
those of activations are in `activation_strategies`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace

from cotrain_compile.dataflow import Buffer, Dataflow
from cotrain_compile.machine import Tier
from cotrain_compile.placement.decisions.clusters import ParamCluster
from cotrain_compile.placement.decisions.effects import (
    Demand,
    DeviceWork,
    Effect,
    Flow,
    Hold,
    HostHold,
    Transient,
    UpdateEffect,
)
from cotrain_compile.placement.policies import SMALL_STATE_BYTES
from cotrain_compile.plan import Placement, UpdateMode
from cotrain_compile.plan.on_disk import gradients_may_rest, may_rest_on_disk, weight_may_rest

_MODES = {
    UpdateMode.RESIDENT: "on the device",
    UpdateMode.STREAMED: "states streamed",
    UpdateMode.HOST: "updated on the host",
    UpdateMode.HOST_STREAMED: "updated on the host with the weight there",
}
_FETCHES = ("", ", weight fetched", ", weight fetched twice")


@dataclass(frozen=True)
class Placed:
    """What a strategy writes into a placement: homes and update modes by name, and values.

    These are what is offloaded, once more or not, what is recomputed, and what is updated on
    guesses.
    """

    homes: Mapping[str, Tier] = field(default_factory=dict)
    updates: Mapping[str, UpdateMode] = field(default_factory=dict)
    offloaded: tuple[str, ...] = ()
    refetched: tuple[str, ...] = ()
    recomputed: tuple[str, ...] = ()
    speculative: tuple[str, ...] = ()

    def differs(self, placement: Placement, offloaded: frozenset[str]) -> tuple[int, int]:
        """In how many modes, then homes, absences and guesses, it is not `placement`.

        That has `offloaded` of all that could be.
        """
        modes = sum(placement.updates.get(name) is not mode for name, mode in self.updates.items())
        homes = sum(placement.homes.get(name) is not tier for name, tier in self.homes.items())
        absences = len(offloaded ^ set(self.offloaded))
        guesses = len(self.updates.keys() & set(placement.speculative) ^ set(self.speculative))
        return modes, homes + absences + guesses


@dataclass(frozen=True)
class Strategy:
    """A way to keep and update parameters.

    `mode` is None for frozen ones. `fetches` is how often a step fetches the weight, 0 where that
    is at home on the device. With `gradient_offloaded` the gradient leaves the device until its
    update. With `guesses` an update on the host does not wait for what mostly changes nothing. With
    `on_disk` large states rest on disk, and are read and written piece by piece while it runs; so
    do large parameters with `weight_on_disk`, which are then fetched or cast from there, and what
    lies in their `.grad` with `kept_on_disk`.
    """

    mode: UpdateMode | None
    fetches: int
    gradient_offloaded: bool = False
    guesses: bool = False
    on_disk: bool = False
    weight_on_disk: bool = False
    kept_on_disk: bool = False

    @property
    def on_host(self) -> bool:
        """Whether the update runs on the host."""
        return self.mode in (UpdateMode.HOST, UpdateMode.HOST_STREAMED)

    @property
    def words(self) -> str:
        """The strategy as people read it."""
        mode = "frozen" if self.mode is None else _MODES[self.mode] + ", speculative" * self.guesses
        what = ["states"] * self.on_disk + ["weight"] * self.weight_on_disk
        what += ["kept gradient"] * self.kept_on_disk
        mode += f", {' and '.join(what)} on disk" if what else ""
        if self.mode is UpdateMode.HOST_STREAMED and self.fetches == 1:
            return mode
        return mode + _FETCHES[self.fetches] + ", gradient offloaded" * self.gradient_offloaded

    def fits(self, cluster: ParamCluster) -> bool:
        """Whether it can be chosen for `cluster`."""
        if self.fetches > cluster.most_fetches or cluster.updated is (self.mode is None):
            return False
        if cluster.rests and self.mode is not UpdateMode.RESIDENT:
            return False
        if self.mode is UpdateMode.STREAMED and not cluster.state_bytes:
            return False
        if self.guesses and cluster.guessed is None:
            return False
        if self.on_disk > bool(cluster.disk_bytes):
            return False
        if self.weight_on_disk > bool(cluster.disk_param_bytes):
            return False
        if self.kept_on_disk > bool(cluster.disk_kept_bytes):
            return False
        return cluster.gradient_waits or not self.gradient_offloaded

    def placed(self, dataflow: Dataflow, param: str, fetched: str) -> Placed:
        """`param`, its states and gradient; `fetched` is what crosses the link for its uses.

        A gradient in its `.grad` rests where it does, as everywhere in torch.
        """
        home = Tier.HOST if self.fetches else Tier.DEVICE
        homes = dict.fromkeys((param, *dataflow.kept_gradients.get(param, ())), home)
        if self.weight_on_disk and weight_may_rest(dataflow, param):
            homes[param] = Tier.DISK
        if self.kept_on_disk:
            homes |= dict.fromkeys(gradients_may_rest(dataflow, param), Tier.DISK)
        offloaded = [fetched] if self.fetches == 2 else []
        group = dataflow.update.get(param)
        if group is None or self.mode is None:
            return Placed(homes, {}, tuple(offloaded))
        offloaded += [group.gradient] if self.gradient_offloaded else []
        for state in group.states:
            moves = self.on_host or is_large(dataflow.buffer[state])
            leaves = self.mode is not UpdateMode.RESIDENT and moves
            homes[state] = Tier.HOST if leaves else Tier.DEVICE
        if self.on_disk:
            homes |= dict.fromkeys(may_rest_on_disk(dataflow, group), Tier.DISK)
        # In a cluster that is streamed, what is too small for copies of its own stays.
        stays = self.mode is UpdateMode.STREAMED and Tier.HOST not in homes.values()
        mode = UpdateMode.RESIDENT if stays else self.mode
        on_guesses = (param,) if self.guesses else ()
        return Placed(homes, {param: mode}, tuple(offloaded), speculative=on_guesses)

    def effect(self, cluster: ParamCluster) -> Effect:
        """What it does with `cluster` in a step."""
        update = self._update(cluster)
        return Effect(
            holds=(*self._weights(cluster), *self._states(cluster), *self._gradients(cluster)),
            moved=(
                *self._kept_gradients(cluster),
                *self._kept_on_disk(cluster),
                *self._host_demands(cluster),
            ),
            transients=self._transients(cluster),
            device_work=self._device_work(cluster),
            update=update,
            host_bytes=self._host_bytes(cluster),
            host_holds=(*self._host_holds(cluster),),
            disk_bytes=self._disk_bytes(cluster),
        )

    def _disk_bytes(self, c: ParamCluster) -> int:
        return self._updated_bytes(c) + c.disk_kept_bytes * self.kept_on_disk

    def _updated_bytes(self, c: ParamCluster) -> int:
        """Of what rests on disk, what an update reads and writes."""
        return c.disk_bytes * self.on_disk + c.disk_param_bytes * self.weight_on_disk

    def _weights(self, c: ParamCluster) -> list[Hold]:
        """The parameters at home on the device, or what is fetched of them."""
        if not self.fetches:
            kept = [Hold(c.kept.nbytes, c.kept.made)] if c.kept.nbytes else []
            return [Hold(c.param_bytes), *kept]
        # The weight fetched for the backward stays for the update, which rewrites it.
        stays = self.mode is UpdateMode.STREAMED and not c.param_unused
        # The copy that the device makes is in what the step holds by itself.
        holds = [Hold(-c.fetched_bytes, c.first, c.last)] if c.param_unused else []
        first = Demand(Flow.FETCH, c.fetched_bytes, needed=c.first)
        if self.fetches == 1:
            return [*holds, Hold(c.fetched_bytes, c.first, c.last, first, until_update=stays)]
        again = Demand(Flow.REFETCH, c.fetched_bytes, needed=c.returns, released=c.leaves)
        return [
            *holds,
            Hold(c.fetched_bytes, c.first, c.leaves, first),
            Hold(c.fetched_bytes, c.returns, c.last, again, until_update=stays),
        ]

    def _states(self, c: ParamCluster) -> list[Hold]:
        """What rests on the device; where large states are streamed, small ones may be, too."""
        if self.mode is None or self.on_host:
            return []
        small = Hold(c.small_state_bytes, certain=self.mode is UpdateMode.RESIDENT)
        return [Hold(c.state_bytes - self._streamed_states(c)), small]

    def _gradients(self, c: ParamCluster) -> list[Hold]:
        """A gradient is there until it is sent, or its update has run."""
        if self.mode is None:
            return []
        if self.on_host:
            made, used = c.gradient_made, c.gradient_used
            sent = Demand(Flow.GRADIENT, c.gradient_bytes, released=used, earliest=made)
            return [Hold(c.gradient_bytes, made, used, ends=sent)]
        streamed = self.mode is UpdateMode.STREAMED
        holds = [Hold(c.gradient_bytes, c.gradient_made, c.release, until_update=streamed)]
        if self.gradient_offloaded:
            made, used = c.gradient_made, c.gradient_used
            out = Demand(Flow.OFFLOAD, c.gradient_bytes, released=used, made=made)
            back = Demand(Flow.RELOAD, c.gradient_bytes, needed=c.release)
            holds.append(Hold(-c.gradient_bytes, c.gradient_used + 1, c.release, out, back))
        return holds

    def _kept_gradients(self, c: ParamCluster) -> list[Demand]:
        """What is in `.grad` crosses up for its uses and down when written; one use is certain."""
        if not self.fetches:
            return []
        by_update = self.mode is UpdateMode.STREAMED and c.kept.for_update is not None
        uses = (*c.kept.fetched, *((c.kept.for_update,) if by_update else ()))
        up = [
            Demand(Flow.KEPT_UP, c.kept.nbytes, needed=bucket, certain=number == 0)
            for number, bucket in enumerate(uses)
        ]
        down = [Demand(Flow.KEPT_DOWN, c.kept.nbytes, released=c.kept.written)]
        return up if c.kept.written is None else up + down

    def _kept_on_disk(self, c: ParamCluster) -> list[Demand]:
        """The same of the drive. An update on the host reads it there, which no bound counts."""
        if not self.kept_on_disk:
            return []
        flows = {Flow.KEPT_UP: Flow.DISK_FETCH, Flow.KEPT_DOWN: Flow.DISK_STORE}
        return [
            replace(demand, flow=flows[demand.flow], amount=c.disk_kept_bytes)
            for demand in self._kept_gradients(c)
        ]

    def _host_demands(self, c: ParamCluster) -> list[Demand]:
        """Casts and updates on the host, and a weight that goes there and comes back."""
        demands = []
        if self.fetches and c.param_unused:
            demands.append(Demand(Flow.HOST_CAST, c.cast_s, needed=c.first))
        if self.on_host:
            begins = c.guessed if self.guesses else c.release
            earliest = c.gradient_made if self.guesses else None
            demands.append(
                Demand(Flow.HOST_UPDATE, self._host_s(c), begins, None, earliest, c.first)
            )
        if self.weight_on_disk:
            reads = self.fetches if not c.param_unused else 1
            needed = (c.first, c.returns)[:reads]
            demands += [Demand(Flow.DISK_FETCH, c.disk_param_bytes, needed=k) for k in needed]
        if self.on_disk:
            # To read it, all of a step is time enough for a bound: rooms are what limits it.
            read = Demand(Flow.DISK_READ, self._updated_bytes(c), c.release, None, 0)
            demands += [read, Demand(Flow.DISK_WRITE, read.amount, released=c.release)]
        if self.mode is UpdateMode.HOST:
            back = Demand(Flow.NEW_WEIGHT, c.param_bytes, released=c.release, needed_again=c.first)
            demands += [Demand(Flow.MASTER, c.param_bytes), back]
        return demands

    def _host_s(self, c: ParamCluster) -> float:
        """Seconds of an update on the host; on guesses it saves first what it overwrites."""
        return c.host_s + c.saving_s * self.guesses

    def _device_work(self, c: ParamCluster) -> tuple[DeviceWork, ...]:
        """The device is spared the casts that the host makes."""
        return (DeviceWork(-c.device_cast_s, c.first),) if self.fetches and c.param_unused else ()

    def _transients(self, c: ParamCluster) -> tuple[Transient, ...]:
        """Of what is in `.grad`: one on its way up, the one before on its way down."""
        crossings = [
            d.needed if d.released is None else d.released for d in self._kept_gradients(c)
        ]
        nbytes = 2 * c.largest * c.kept.nbytes
        return tuple(Transient(nbytes, k) for k in dict.fromkeys(crossings) if k is not None)

    def _streamed_states(self, c: ParamCluster) -> int:
        """Bytes of states that come for the update and go home after it."""
        return c.state_bytes if self.mode is UpdateMode.STREAMED else 0

    def _update(self, c: ParamCluster) -> UpdateEffect | None:
        if self.mode is None:
            return None
        in_pieces = self.mode is UpdateMode.STREAMED
        up = home = self._streamed_states(c)
        if self.mode is UpdateMode.STREAMED and self.fetches:
            up, home = up + c.param_bytes * c.param_unused, home + c.param_bytes
        if self.mode is UpdateMode.HOST:
            home = c.param_bytes
        return UpdateEffect(
            tier=Tier.HOST if self.on_host else Tier.DEVICE,
            seconds=self._host_s(c) if self.on_host else c.device_s,
            released=c.release,
            home_bytes=home,
            gradient_bytes=c.gradient_bytes,
            workspace_bytes=c.piece_workspace_bytes if in_pieces else c.workspace_bytes,
            made_bytes=c.made_bytes,
            largest=c.largest_piece if in_pieces else c.largest,
            least_largest=c.least_piece if in_pieces else c.least_largest,
            up_bytes=up,
            guesses=self.guesses,
        )

    def _host_bytes(self, c: ParamCluster) -> int:
        """Homes, and what is saved on guesses."""
        nbytes = (c.param_bytes + c.kept.nbytes) * bool(self.fetches)
        nbytes += c.second_bytes * self.guesses
        nbytes -= self._disk_bytes(c)
        return nbytes + (c.state_bytes if self.on_host else self._streamed_states(c))

    def _host_holds(self, c: ParamCluster) -> Iterator[HostHold]:
        """A low-precision copy to its last fetch, a gradient and a weight until their update."""
        if self.fetches and c.param_unused:
            known = (c.leaves, c.returns) if self.fetches == 2 else (None, None)
            yield HostHold(c.fetched_bytes, 0, c.returns if self.fetches == 2 else c.first, *known)
        if self.on_host or self.gradient_offloaded:
            yield HostHold(c.gradient_bytes, c.gradient_made)
        if self.mode is UpdateMode.HOST:
            yield HostHold(c.param_bytes, 0)


def is_large(state: Buffer) -> bool:
    """Whether an optimizer state is worth a copy of its own (a step counter is not)."""
    return state.nbytes > SMALL_STATE_BYTES


# All there are; the first that fits is where the greedy begins.
PARAM_STRATEGIES: tuple[Strategy, ...] = (
    *(Strategy(None, fetches) for fetches in range(3)),
    Strategy(UpdateMode.RESIDENT, 0),
    Strategy(UpdateMode.HOST, 0),
    *(Strategy(UpdateMode.HOST_STREAMED, fetches) for fetches in (1, 2)),
    *(Strategy(UpdateMode.STREAMED, fetches) for fetches in range(3)),
    Strategy(UpdateMode.RESIDENT, 0, gradient_offloaded=True),
    *(Strategy(UpdateMode.STREAMED, fetches, gradient_offloaded=True) for fetches in (0, 2)),
    Strategy(UpdateMode.HOST, 0, guesses=True),
    *(Strategy(UpdateMode.HOST_STREAMED, fetches, guesses=True) for fetches in (1, 2)),
    Strategy(UpdateMode.HOST, 0, on_disk=True),
    *(Strategy(UpdateMode.HOST_STREAMED, fetches, on_disk=True) for fetches in (1, 2)),
    *(
        Strategy(UpdateMode.HOST_STREAMED, fetches, False, False, True, True, kept_on_disk)
        for kept_on_disk in (False, True)
        for fetches in (1, 2)
    ),
    *(
        Strategy(None, fetches, weight_on_disk=True, kept_on_disk=kept_on_disk)
        for kept_on_disk in (False, True)
        for fetches in (1, 2)
    ),
)


def fitting(cluster: ParamCluster) -> tuple[Strategy, ...]:
    """The strategies that can be chosen for `cluster`."""
    return tuple(strategy for strategy in PARAM_STRATEGIES if strategy.fits(cluster))


def strategy_of(dataflow: Dataflow, placement: Placement, param: str, fetched: str) -> Strategy:
    """The strategy whose placement of `param` is that of `placement`, or is closest to it."""
    group = dataflow.update.get(param)
    owned = frozenset({fetched, group.gradient} if group else {fetched})
    offloaded = owned.intersection(placement.offloaded)
    return min(
        (s for s in PARAM_STRATEGIES if (s.mode is None) is (group is None)),
        key=lambda s: s.placed(dataflow, param, fetched).differs(placement, offloaded),
    )

"""Activation strategies: what can be done with values that a step makes, as `strategies` has it."""

from __future__ import annotations

from dataclasses import dataclass, replace

from cotrain_compile.placement.decisions.clusters import ActivationCluster
from cotrain_compile.placement.decisions.effects import (
    Demand,
    DeviceWork,
    Effect,
    Exchanged,
    Flow,
    Hold,
    HostHold,
)
from cotrain_compile.placement.decisions.strategies import Placed


@dataclass(frozen=True)
class Stays:
    """Activations stay on the device; they are in what the step holds by itself."""

    words: str = "kept"

    def fits(self, cluster: ActivationCluster) -> bool:
        """Whether it can be chosen for `cluster`."""
        del cluster
        return True

    def placed(self, cluster: ActivationCluster) -> Placed:
        del cluster
        return Placed()

    def effect(self, cluster: ActivationCluster) -> Effect:
        del cluster
        return Effect()


@dataclass(frozen=True)
class Offloaded(Stays):
    """Activations are sent when they are made, gone after their last use, back for the next."""

    words: str = "offloaded"

    def fits(self, cluster: ActivationCluster) -> bool:
        return cluster.movable and not cluster.sent

    def placed(self, cluster: ActivationCluster) -> Placed:
        return Placed(offloaded=cluster.buffers)

    def effect(self, cluster: ActivationCluster) -> Effect:
        c = cluster
        source = c.again.source if c.again is not None else None
        out = Demand(Flow.OFFLOAD, c.nbytes, c.leaves, None, source, made=c.made)
        back = Demand(Flow.RELOAD, c.nbytes, needed=c.returns)
        gone = Hold(-c.nbytes, c.leaves + 1, c.returns - 1, out, back)
        on_host = HostHold(c.nbytes, c.leaves, c.returns, c.leaves, c.returns)
        return Effect(holds=(gone,), host_holds=(on_host,))


@dataclass(frozen=True)
class OffloadedToDisk(Offloaded):
    """The same by way of the host to disk and back; of those offloaded the schedule says which."""

    words: str = "offloaded to disk"

    def fits(self, cluster: ActivationCluster) -> bool:
        return super().fits(cluster) and cluster.may_rest_on_disk

    def effect(self, cluster: ActivationCluster) -> Effect:
        (gone,) = super().effect(cluster).holds
        assert gone.begins is not None and gone.ends is not None
        written = replace(gone.begins, flow=Flow.DISK_STORE)
        read = replace(gone.ends, flow=Flow.DISK_FETCH)
        return Effect(holds=(gone,), moved=(written, read), disk_bytes=cluster.nbytes)


@dataclass(frozen=True)
class Refetched(Stays):
    """Activations that were offloaded before are gone once more, and come from the same copy.

    A bound takes them to be there.
    """

    words: str = "fetched again"

    def fits(self, cluster: ActivationCluster) -> bool:
        return cluster.movable and cluster.sent

    def placed(self, cluster: ActivationCluster) -> Placed:
        return Placed(refetched=cluster.buffers)

    def effect(self, cluster: ActivationCluster) -> Effect:
        c = cluster
        back = Demand(Flow.RELOAD, c.nbytes, c.leaves, c.returns)
        on_host = HostHold(c.nbytes, c.leaves, c.returns, c.leaves, c.returns)
        gone = Hold(-c.nbytes, c.leaves + 1, c.returns - 1, None, back)
        return Effect(holds=(gone,), host_holds=(on_host,))


@dataclass(frozen=True)
class MadeAgain(Stays):
    """Activations are made again right before the backward needs them, or what is made of them.

    The latter is `ahead` buckets before, or up to twice as many.
    """

    words: str = "recomputed"
    ahead: int = 0

    def fits(self, cluster: ActivationCluster) -> bool:
        again = cluster.again
        return again is not None and (not self.ahead or again.first <= again.by - self.ahead)

    def placed(self, cluster: ActivationCluster) -> Placed:
        return Placed(recomputed=cluster.buffers)

    def effect(self, cluster: ActivationCluster) -> Effect:
        again = cluster.again
        assert again is not None
        by = again.by - self.ahead
        missing = Hold(-cluster.nbytes, again.first, min(again.last, by))
        # What runs before the op at which a bucket begins is in the bucket before.
        earliest = 0 if again.network_s else max(0, again.by - max(1, 2 * self.ahead))
        gathered = (Exchanged(again.network_s, 0, again.by),) if again.network_s else ()
        return Effect(
            holds=(missing,),
            device_work=(DeviceWork(again.seconds, by, earliest),),
            exchanges=gathered,
        )


# All there are; the first is where the greedy begins.
ACTIVATION_STRATEGIES: tuple[Stays, ...] = (
    Stays(),
    Offloaded(),
    OffloadedToDisk(),
    Refetched(),
    *(MadeAgain(ahead=ahead) for ahead in (0, 1, 2, 4, 8, 16, 32)),
)

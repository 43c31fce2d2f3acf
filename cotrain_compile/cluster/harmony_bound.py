"""Harmony's bound: seconds that a step takes at least, from its tasks alone, without simulation.

In: a `TaskGraph`, what its packs cost and the server. Out: seconds that no order of its works can
beat. Close to what the simulation says, so that a search need simulate few choices.

Of each task on a device, in order, a chain of works follows that of the task before it:

    weights   come after the deletion before, with prefetch after the last computing before; the
              first task of a device waits too for what reaches it through those of other devices
    each      of a micro-batch: input, computing, with what is sent and awaited between
    end       all-reduce, gradients home, deletion
    rest      after the last micro-batch of a task, it has to pass through all tasks behind it

With prefetch copies come beside computing, so that only computing counts in `each`.
"""

from __future__ import annotations

from collections import Counter
from functools import cached_property
from itertools import accumulate

from cotrain_compile.cluster.harmony_lanes import Lanes, Server
from cotrain_compile.cluster.harmony_packs import PackCosts
from cotrain_compile.cluster.harmony_tasks import Layout, Task, TaskGraph, TaskKind


def least_s(graph: TaskGraph, costs: PackCosts, server: Server, *, prefetch: bool) -> float:
    """The longest of the chains of all devices."""
    return _Bound(graph, costs, server, prefetch).longest_s()


class _Bound:
    def __init__(self, graph: TaskGraph, costs: PackCosts, server: Server, prefetch: bool) -> None:
        self.graph, self.costs, self.server, self.prefetch = graph, costs, server, prefetch
        self.alone = graph.layout is Layout.DATA_PARALLEL or graph.devices == 1
        self.swap_bytes_per_s = Lanes(server, graph.devices).swap_bytes_per_s

    @cached_property
    def _turn(self) -> int:
        """The place of the backward with the loss."""
        return len(self.graph.choice.forward_packs)

    def longest_s(self) -> float:
        sequence = self.graph.sequence
        # What passes through all tasks behind each one, and what the last one then sends home.
        passing = [self._passing_s(place, task) for place, task in enumerate(sequence)]
        rest = list(accumulate(reversed(passing[1:]), initial=self._last_s(sequence[-1])))[::-1]
        reached_s = 0.0
        computed: dict[int, float] = {}  # by device, the end of what it computes so far
        ended: dict[int, float] = {}  # by device, the end of its task with all that it sends
        longest = 0.0
        for place, task in enumerate(sequence):
            weights_s = self._swap_s(self.costs.weight_bytes(task.pack))
            all_s = self._all_micro_batches_s(place, task)
            if task.device not in ended:
                first_s = self._each_s(place, task, task.micro_batches[0])
                reached_s = max(weights_s + first_s, reached_s + passing[place])
                done_s = reached_s - first_s + all_s
            elif self.prefetch:
                done_s = max(computed[task.device] + weights_s, ended[task.device]) + all_s
            else:
                done_s = ended[task.device] + weights_s + all_s
            computed[task.device] = done_s
            ended[task.device] = done_s + self._end_s(task) + self.server.deletion_s
            longest = max(longest, ended[task.device], done_s + rest[place])
        return longest

    def _swap_s(self, nbytes: float) -> float:
        return nbytes / self.swap_bytes_per_s

    def _enters_s(self, place: int, samples: int, layer: int) -> float:
        """What enters `layer`, made by the task before: from its device, or from the host."""
        nbytes = self.costs.input_bytes(samples, layer)
        by_host = self.alone or place == 0 or (place == self._turn and self.graph.converts)
        return self._swap_s(nbytes) if by_host else nbytes / self.server.peer_bytes_per_s

    def _all_micro_batches_s(self, place: int, task: Task) -> float:
        sizes = Counter(task.micro_batches)
        return sum(n * self._each_s(place, task, samples) for samples, n in sizes.items())

    def _each_s(self, place: int, task: Task, samples: int) -> float:
        """Seconds from one micro-batch of a task to the next."""
        pack, costs = task.pack, self.costs
        seconds = costs.forward_s(samples, pack)
        if task.kind is TaskKind.BACKWARD:
            seconds += costs.backward_s(samples, pack)
        if self.prefetch:
            return seconds
        if task.kind is TaskKind.FORWARD:
            leaving = costs.input_bytes(samples, pack.last) if self.alone else 0.0
            sent_s = self._stashed_s(task, samples) + self._swap_s(leaving)
            return seconds + sent_s + self._enters_s(place, samples, pack.first)
        entering = costs.input_bytes(samples, pack.first)
        if self.graph.has_loss(task):
            seconds += self._enters_s(place, samples, pack.first)
        else:
            seconds += self._swap_s(entering) + self._enters_s(place, samples, pack.last)
        if self.alone and place < len(self.graph.sequence) - 1:
            seconds += self._swap_s(entering)  # its gradient goes out
        return seconds

    def _stashed_s(self, task: Task, samples: int) -> float:
        layers = [reader.pack.first for reader in self.graph.stashed(task)]
        return self._swap_s(sum(self.costs.input_bytes(samples, layer) for layer in layers))

    def _passing_s(self, place: int, task: Task) -> float:
        """From what a task reads to what it makes, of its last micro-batch."""
        samples = task.micro_batches[-1]
        seconds = self.costs.forward_s(samples, task.pack)
        if task.kind is TaskKind.FORWARD:
            sent_s = 0.0 if self.prefetch else self._stashed_s(task, samples)
            return seconds + sent_s + self._enters_s(place, samples, task.pack.first)
        backward_s = self.costs.backward_s(samples, task.pack)
        if self.graph.has_loss(task):
            return seconds + backward_s + self._enters_s(place, samples, task.pack.first)
        return backward_s + self._enters_s(place, samples, task.pack.last)

    def _end_s(self, task: Task) -> float:
        """What a task sends home before it is deleted."""
        if task.kind is TaskKind.FORWARD:
            return 0.0
        nbytes = self.costs.weight_bytes(task.pack)
        return self._all_reduce_s(nbytes) + self._swap_s(nbytes)

    def _all_reduce_s(self, nbytes: float) -> float:
        if self.graph.layout is not Layout.DATA_PARALLEL:
            return 0.0
        n = self.graph.devices
        return 2 * (n - 1) / n * nbytes / self.server.peer_bytes_per_s

    def _last_s(self, task: Task) -> float:
        """After all computing: gradients home, then the deletion and beside it the update."""
        alone_s = self.costs.update_s(task.pack)
        update_s = self.server.update_s(alone_s, self.graph.shares_host)
        return self._end_s(task) + max(self.server.deletion_s, update_s)

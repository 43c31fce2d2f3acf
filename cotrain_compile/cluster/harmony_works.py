"""Harmony's works: what copies, computes and updates the tasks of a step are made of.

In: a `TaskGraph`, what its packs cost and the server. Out: `Works`, on six lanes of each device. It
is the event model of the authors' scheduler (Harmony, VLDB 2022), on the simulator's engine.

The order of works is this. Weights come in, then for each micro-batch its input, computing (in
parts, where inputs of the backward's packs lie inside), the output; a backward first makes its
forward again; gradients go out, what the task held is deleted, and the host updates. Without
prefetch each micro-batch waits for the one before it, and a task for the deletion before it. With
it, weights come once the task before has computed, and inputs are buffered twice.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from cotrain_compile.cluster.harmony_lanes import Content, Lanes, Server, Stream, Works
from cotrain_compile.cluster.harmony_packs import Pack, PackCosts
from cotrain_compile.cluster.harmony_tasks import Layout, Task, TaskGraph, TaskKind, made_by


def harmony_works(
    graph: TaskGraph, costs: PackCosts, server: Server, *, prefetch: bool = False
) -> Works:
    """All works of a step; under data parallelism those of the first device."""
    step = _Step(graph, costs, server, prefetch)
    for task in graph.tasks:
        if task.kind is TaskKind.FORWARD:
            step.forward(task)
        elif task.kind is TaskKind.BACKWARD:
            step.backward(task)
        else:
            step.update(task)
    copies = graph.devices if graph.layout is Layout.DATA_PARALLEL else 1
    return step.lanes.joined(copies)


@dataclass
class _Ran:
    """Names of what a task has put on its device: by micro-batch, and its deletion."""

    task: Task
    computed: list[str] = field(default_factory=list)
    recomputed: list[str] = field(default_factory=list)
    gone_out: list[str] = field(default_factory=list)
    deleted: str = ""


class _Step:
    """The works so far."""

    def __init__(self, graph: TaskGraph, costs: PackCosts, server: Server, prefetch: bool) -> None:
        self.graph, self.costs, self.server, self.prefetch = graph, costs, server, prefetch
        self.alone = graph.layout is Layout.DATA_PARALLEL or graph.devices == 1
        self.lanes = Lanes(server, graph.devices)
        self.ran: dict[int, list[_Ran]] = {}
        first = graph.sequence[0].micro_batches
        self.made_by = made_by(first, graph.sequence[-1].micro_batches)

    def forward(self, task: Task) -> None:
        """Weights; for each micro-batch its input, computing, stashed inputs, output."""
        ran, waiting = self._begin(task, late=self.alone)
        before = _weights(task)
        for i, samples in enumerate(task.micro_batches):
            entered = self._input(task, i, samples, self._ready(task, i, before))
            if waiting and i == 0:
                self._weights_in(ran)
            computed = self._forward_parts(task, i, samples, entered)
            ran.computed.append(computed)
            ran.gone_out.append(self._output(task, i, samples, computed))
            before = ran.gone_out[-1] if self.alone else computed
        waits = [ran.gone_out[-1]] if self.alone and not self.prefetch else []
        self._delete(ran, waits)

    def backward(self, task: Task) -> None:
        """Weights; of each micro-batch input, forward, gradient, backward, gradient; the rest."""
        loss = self.graph.has_loss(task)
        ran, waiting = self._begin(task, late=self.alone or not loss)
        before = _weights(task)
        for i, samples in enumerate(task.micro_batches):
            ready = self._ready(task, i, before)
            entered = (
                self._input(task, i, samples, ready)
                if loss
                else self._stashed_input(task, i, samples, ready)
            )
            again = _named(task, "forward again", i)
            reads = [self._gradient_in(task, i, samples, again)] if not loss else []
            if waiting and i == 0:
                self._weights_in(ran)
            arrived = [_weights(task), entered] if i == 0 else [entered]
            self._compute(task, again, self.costs.forward_s(samples, task.pack), arrived)
            ran.recomputed.append(again)
            computed = _named(task, "backward", i)
            self._compute(task, computed, self.costs.backward_s(samples, task.pack), reads)
            ran.computed.append(computed)
            ran.gone_out += self._gradient_out(task, i, samples, computed)
            before = ran.gone_out[-1] if self.alone and ran.gone_out else computed
        self._delete(ran, [self._gradients(task, ran)])

    def update(self, task: Task) -> None:
        """The host updates what the backward before it has sent home."""
        last = self.ran[task.device][-1].task
        seconds = self.server.update_s(self.costs.update_s(task.pack), self.graph.shares_host)
        gone_home = [_named(last, "gradients")]
        self.lanes.put(task.device, Stream.HOST, task.name, seconds, gone_home)

    def _begin(self, task: Task, *, late: bool) -> tuple[_Ran, bool]:
        """The record of the task, and whether its weights come behind its first inputs."""
        earlier = self.ran.setdefault(task.device, [])
        earlier.append(ran := _Ran(task))
        waiting = late and self.prefetch and len(earlier) > 1
        if not waiting:
            self._weights_in(ran)
        return ran, waiting

    def _weights_in(self, ran: _Ran) -> None:
        *earlier, _ = self.ran[ran.task.device]
        after = []
        if earlier:
            after = [earlier[-1].computed[-1] if self.prefetch else earlier[-1].deleted]
        nbytes = self.costs.weight_bytes(ran.task.pack)
        name = _weights(ran.task)
        self.lanes.swap(ran.task.device, Stream.SWAP_IN, name, nbytes, after, Content.WEIGHTS)

    def _ready(self, task: Task, i: int, before: str) -> list[str]:
        """When there is room for the input of micro-batch i."""
        if not self.prefetch:
            return [before]
        *earlier, own = self.ran[task.device]
        if i >= 2:
            return [own.computed[i - 2]]
        if not earlier:
            return []
        if i == 1:
            return [earlier[-1].deleted]
        if len(earlier[-1].computed) >= 2:
            return [earlier[-1].computed[-2]]
        return [earlier[-2].deleted] if len(earlier) >= 2 else []

    def _input(self, task: Task, i: int, samples: int, ready: Sequence[str]) -> str:
        """What the layers before have made: from their device, or from the host."""
        name = _named(task, "input", i)
        nbytes = self.costs.input_bytes(samples, task.pack.first)
        maker = self.graph.before(task)
        if maker is None:
            self.lanes.swap(task.device, Stream.SWAP_IN, name, nbytes, ready)
            return name
        if self._by_peer(maker, task):
            sent = _named(maker, "output", i)
            self.lanes.copy(task.device, Stream.PEER_IN, name, nbytes, ready, sent)
            return name
        made = i if task.kind is TaskKind.FORWARD else self.made_by[i]
        told = _named(maker, "message of output", i)
        source = _named(maker, "output", made) if self.alone else told
        self.lanes.swap(task.device, Stream.SWAP_IN, name, nbytes, [source, *ready])
        return name

    def _stashed_input(self, task: Task, i: int, samples: int, ready: Sequence[str]) -> str:
        """The input of a backward's pack, which its forward has sent to the host."""
        forward = self.graph.forward_of(task)
        source = _named(forward, f"message of layer {task.pack.first}", i)
        nbytes = self.costs.input_bytes(samples, task.pack.first)
        name = _named(task, "input", i)
        self.lanes.swap(task.device, Stream.SWAP_IN, name, nbytes, [source, *ready])
        return name

    def _forward_parts(self, task: Task, i: int, samples: int, entered: str) -> str:
        """The forward, cut where a pack of the backward begins; that input goes to the host."""
        reader_of = {reader.pack.first: reader for reader in self.graph.stashed(task)}
        begins = sorted({task.pack.first, *reader_of})
        after = [_weights(task), entered] if i == 0 else [entered]
        made = {task.pack.first: entered}
        for first, last in pairwise([*begins, task.pack.last]):
            if first in reader_of and not self.prefetch:
                after.append(_named(task, f"input of layer {first}", i))
            made[last] = _named(task, f"forward {first}-{last - 1}", i)
            self._compute(task, made[last], self.costs.forward_s(samples, Pack(first, last)), after)
            after = []
        for first, reader in reader_of.items():
            self._stash(task, reader, i, samples, made[first])
        return made[task.pack.last]

    def _stash(self, task: Task, reader: Task, i: int, samples: int, made: str) -> None:
        layer = reader.pack.first
        name = _named(task, f"input of layer {layer}", i)
        after = [made]
        if self.prefetch and layer == task.pack.first:
            *earlier, own = self.ran[task.device]
            after += [own.computed[i - 1]] if i else [earlier[-1].deleted] if earlier else []
        nbytes = self.costs.input_bytes(samples, layer)
        self.lanes.swap(task.device, Stream.SWAP_OUT, name, nbytes, after)
        self._messages(task, reader, f"message of layer {layer}", layer, i, name)

    def _output(self, task: Task, i: int, samples: int, computed: str) -> str:
        """What the next layers read: to their device, or to the host."""
        name = _named(task, "output", i)
        reader = self.graph.next_of(task)
        assert reader is not None  # a backward comes after the last forward
        nbytes = self.costs.input_bytes(samples, task.pack.last)
        if self._by_peer(task, reader):
            read = _named(reader, "input", i)
            self.lanes.copy(task.device, Stream.PEER_OUT, name, nbytes, [computed], read)
            return name
        self.lanes.swap(task.device, Stream.SWAP_OUT, name, nbytes, [computed])
        if not self.alone:
            self._messages(task, reader, "message of output", task.pack.last, i, name)
        return name

    def _messages(
        self, task: Task, reader: Task, what: str, layer: int, i: int, after: str
    ) -> None:
        """The host hands what enters `layer` over, in micro-batches of the backward."""
        for j, samples in enumerate(reader.micro_batches):
            if self.made_by[j] == i:
                near = self.alone or reader.device == task.device
                nbytes = 0.0 if near else self.costs.input_bytes(samples, layer)
                self.lanes.hand_over(task.device, _named(task, what, j), nbytes, [after])

    def _gradient_in(self, task: Task, i: int, samples: int, again: str) -> str:
        """The gradient of what the pack has made."""
        name = _named(task, "gradient of output", i)
        maker = self.graph.before(task)
        assert maker is not None  # the backward with the loss
        ready = self._gradient_ready(task, i, again)
        nbytes = self.costs.input_bytes(samples, task.pack.last)
        sent = _named(maker, "gradient of input", i)
        if self._by_peer(maker, task):
            self.lanes.copy(task.device, Stream.PEER_IN, name, nbytes, ready, sent)
        else:
            self.lanes.swap(task.device, Stream.SWAP_IN, name, nbytes, [sent, *ready])
        return name

    def _gradient_ready(self, task: Task, i: int, again: str) -> list[str]:
        if not self.prefetch:
            return [again]
        *earlier, own = self.ran[task.device]
        if i:
            return [own.recomputed[i - 1]]
        if not earlier:
            return []
        left = earlier[-1]
        inner = left.task.kind is TaskKind.BACKWARD and not self.graph.has_loss(left.task)
        if self.alone or inner:
            return [left.recomputed[-1]]
        return self._ready(task, 0, "")

    def _gradient_out(self, task: Task, i: int, samples: int, computed: str) -> list[str]:
        reader = self.graph.next_of(task)
        if reader is None:
            return []
        name = _named(task, "gradient of input", i)
        nbytes = self.costs.input_bytes(samples, task.pack.first)
        if self._by_peer(task, reader):
            read = _named(reader, "gradient of output", i)
            self.lanes.copy(task.device, Stream.PEER_OUT, name, nbytes, [computed], read)
        else:
            self.lanes.swap(task.device, Stream.SWAP_OUT, name, nbytes, [computed])
        return [name]

    def _gradients(self, task: Task, ran: _Ran) -> str:
        """Gradients of the pack: reduced over the devices that have it too, then to the host."""
        name = _named(task, "gradients")
        nbytes = self.costs.weight_bytes(task.pack)
        gone_out = ran.gone_out[-1:] if self.alone and not self.prefetch else []
        if self.graph.layout is Layout.DATA_PARALLEL and self.graph.devices > 1:
            sent = 2 * (self.graph.devices - 1) / self.graph.devices * nbytes
            reduced = _named(task, "all-reduce")
            self._compute(task, reduced, sent / self.server.peer_bytes_per_s, gone_out)
            self.lanes.moved[Stream.PEER_OUT, Content.GRADIENTS] += sent
            gone_out = [reduced]
        after = [ran.computed[-1], *gone_out]
        self.lanes.swap(task.device, Stream.SWAP_OUT, name, nbytes, after, Content.GRADIENTS)
        return name

    def _delete(self, ran: _Ran, after: Sequence[str]) -> None:
        ran.deleted = _named(ran.task, "deletion")
        self._compute(ran.task, ran.deleted, self.server.deletion_s, after)

    def _compute(self, task: Task, name: str, seconds: float, after: Sequence[str]) -> None:
        self.lanes.put(task.device, Stream.COMPUTE, name, seconds, after)

    def _by_peer(self, maker: Task, reader: Task) -> bool:
        """Whether what `maker` makes goes to the device of `reader` directly.

        Micro-batches of another size are put together from several on the host.
        """
        turns = maker.kind is not reader.kind and self.graph.converts
        return not self.alone and not turns


def _weights(task: Task) -> str:
    return _named(task, "weights")


def _named(task: Task, what: str, i: int | None = None) -> str:
    return f"{task.name}: {what}" if i is None else f"{task.name}: {what}, micro-batch {i}"

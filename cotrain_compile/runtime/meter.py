"""Meter: the bytes that live tensors really hold on each tier, against a budget.

Counts storages, not tensors: views add nothing, and a storage is counted until the last reference
to it, wherever that is, has gone.

A graph run op by op on one tier, every result counted by the meter.

In: a graph of ops and the tier they run on. Out: a function of its inputs. Unlike `fx.Interpreter`
it is prepared once for many runs and does nothing for tracing: for one update that took about 80 µs
of 90, and takes 10 of 20 here.
"""

from __future__ import annotations

import sys
import threading
import time
import weakref
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from operator import attrgetter
from typing import Any

import torch
import torch.distributed
from torch import fx

from cotrain_compile.errors import OutOfDeviceMemory
from cotrain_compile.graph import returns_argument_memory
from cotrain_compile.machine import Tier
from cotrain_compile.runtime.bound_ops import bound
from cotrain_compile.support.units import format_bytes

# How long the thread of a process group may hold what it has exchanged.
_LET_GO_S = 1.0


def _ranks_exchange() -> bool:
    return torch.distributed.is_available() and torch.distributed.is_initialized()


class _Counted(weakref.ref[torch.UntypedStorage]):
    """A storage that is counted, and what to take off when it has gone."""

    __slots__ = ("key", "nbytes", "tier")

    key: int
    nbytes: int
    tier: Tier


class Curve:
    """Bytes after every change, by perf_counter seconds; to be gone through as pairs of these.

    Kept in two rows: the garbage collector would look at each of thousands of pairs.
    """

    __slots__ = ("_at_s", "_used_bytes")

    def __init__(self, at_s: Iterable[float] = (), used_bytes: Iterable[int] = ()) -> None:
        self._at_s, self._used_bytes = [*at_s], [*used_bytes]

    def add(self, at_s: float, used_bytes: int) -> None:
        self._at_s.append(at_s)
        self._used_bytes.append(used_bytes)

    def copy(self) -> Curve:
        """It as it is now."""
        return Curve(self._at_s, self._used_bytes)

    def __iter__(self) -> Iterator[tuple[float, int]]:
        return zip(self._at_s, self._used_bytes, strict=True)


class MemoryMeter:
    """Bytes now and at most, per tier. `track` may be called from any thread."""

    def __init__(self, budgets: Mapping[Tier, int]) -> None:
        self.budgets = {tier: budgets.get(tier, sys.maxsize) for tier in Tier}
        self.peak_bytes = dict.fromkeys(Tier, 0)
        self._used_bytes = dict.fromkeys(Tier, 0)
        self._curve = {tier: Curve() for tier in Tier}
        self._storages: dict[int, _Counted] = {}
        # What has died and is still counted. No function of Python's is called when a storage dies:
        # a Ctrl-C that came in it would be lost.
        self._gone: deque[_Counted] = deque()
        self._when_gone = self._gone.append  # one object for all storages
        self._remembered: dict[int, _Counted] = {}
        self._remembered_bytes = dict.fromkeys(Tier, 0)
        self._lock = threading.RLock()

    @property
    def used_bytes(self) -> Mapping[Tier, int]:
        """Bytes of what is alive now."""
        with self._lock:
            self._settle()
            return dict(self._used_bytes)

    @property
    def peak_bytes_held(self) -> dict[Tier, int]:
        """`peak_bytes`, of a drive only where anything rests there."""
        return {t: n for t, n in self.peak_bytes.items() if n or t is not Tier.DISK}

    @property
    def curve(self) -> Mapping[Tier, Curve]:
        """The bytes after every change; what died is noticed at the next."""
        with self._lock:
            self._settle()
            return self._curve

    def track(self, value: object, tier: Tier, where: str) -> None:
        """Count the storage of a tensor (or of each in a tuple) on `tier` from now on.

        Raises `OutOfDeviceMemory` when that passes the budget, as an allocator would.
        """
        if isinstance(value, torch.Tensor):
            storage = value.untyped_storage()
            self.count(storage, tier, where, storage.nbytes())
        elif isinstance(value, list | tuple):
            for item in value:
                self.track(item, tier, where)

    def count(self, storage: torch.UntypedStorage, tier: Tier, where: str, nbytes: int) -> None:
        """As `track`, for a storage that counts with so many bytes."""
        key = storage._cdata
        with self._lock:
            if self._gone:
                self._settle()
            if key in self._storages:
                return
            counted = _Counted(storage, self._when_gone)
            counted.tier, counted.nbytes, counted.key = tier, nbytes, key
            self._storages[key] = counted
            used = self._change(tier, nbytes)
            if used > self.budgets[tier] and _ranks_exchange():
                used = self._used_after_exchanges(tier)
            if used > self.peak_bytes[tier]:
                self.peak_bytes[tier] = used
        if used > self.budgets[tier]:
            self._refuse_beyond_budget(used, nbytes, tier, where)

    def track_batch(self, batch: torch.Tensor, where: str) -> None:
        """Count a batch on the device by the elements it shows: it may be a slice of a data set."""
        self.count(batch.untyped_storage(), Tier.DEVICE, where, batch.nbytes)

    def hold(self, nbytes: int, tier: Tier, where: str) -> None:
        """Count `nbytes` more until as many less are held; no storage is known. Raises as `track`.

        For values that are made, and go, many at once.
        """
        with self._lock:
            if self._gone:
                self._settle()
            used = self._change(tier, nbytes)
            if used > self.peak_bytes[tier]:
                self.peak_bytes[tier] = used
        if nbytes > 0:
            self._refuse_beyond_budget(used, nbytes, tier, where)

    def add_for_a_moment(self, nbytes: int, tier: Tier, where: str) -> None:
        """Count `nbytes` beyond those in use, which are given back at once. Raises as `track`."""
        with self._lock:
            self._settle()
            before = self._used_bytes[tier]
            used, now_s = before + nbytes, time.perf_counter()
            self._curve[tier].add(now_s, used)
            self._curve[tier].add(now_s, before)
            if used > self.peak_bytes[tier]:
                self.peak_bytes[tier] = used
        self._refuse_beyond_budget(used, nbytes, tier, where)

    @contextmanager
    def without_limit(self, tier: Tier) -> Iterator[None]:
        """Within it `tier` refuses nothing: all that a step takes there is counted."""
        budget_bytes, self.budgets[tier] = self.budgets[tier], sys.maxsize
        try:
            yield
        finally:
            self.budgets[tier] = budget_bytes

    def start_step(self, keep: Tier | None = None) -> None:
        """Count from nothing: what a step returned belongs to the user when the next one starts.

        On the tier `keep` what is alive stays counted: a task of the step before still uses it.
        """
        with self._lock:
            self._settle()
            known = self._storages.items() if keep is not None else ()
            kept = self._storages = {key: item for key, item in known if item.tier is keep}
            self._used_bytes = dict.fromkeys(Tier, 0)
            for counted in kept.values():
                self._used_bytes[counted.tier] += counted.nbytes
            self.peak_bytes = dict(self._used_bytes)
            self._curve = {tier: Curve() for tier in Tier}

    def remember(self, tensors: Iterable[torch.Tensor]) -> None:
        """Keep in mind that these are counted, for `recall` in later steps."""
        with self._lock:
            self._settle()
            keys = {tensor.untyped_storage()._cdata for tensor in tensors}
            self._remembered = {key: self._storages[key] for key in keys}
            self._remembered_bytes = dict.fromkeys(Tier, 0)
            for counted in self._remembered.values():
                self._remembered_bytes[counted.tier] += counted.nbytes

    def recall(self) -> bool:
        """Count all that was kept in mind at once; False, and nothing, where some of it has died.

        To count the inputs of a step one by one takes milliseconds. False as well where a budget
        does not allow it: counted one by one, the error says where.
        """
        with self._lock:
            self._settle()
            more = dict(self._remembered_bytes)
            for key in self._storages.keys() & self._remembered.keys():
                counted = self._remembered[key]
                more[counted.tier] -= counted.nbytes
            fits = all(self._used_bytes[tier] + more[tier] <= self.budgets[tier] for tier in Tier)
            if not self._remembered or not fits:
                return False
            self._storages = {**self._remembered, **self._storages}
            for tier, nbytes in more.items():
                if nbytes:
                    self._change(tier, nbytes)
                used = self._used_bytes[tier]
                self.peak_bytes[tier] = max(self.peak_bytes[tier], used)
        return True

    def _used_after_exchanges(self, tier: Tier) -> int:
        """Bytes in use once the threads of process groups have let go of what was exchanged.

        A wait for a collective returns a moment before the thread that carried it out drops its
        references, which may be long where that thread gets no core.
        """
        until = time.perf_counter() + _LET_GO_S
        while self._used_bytes[tier] > self.budgets[tier] and time.perf_counter() < until:
            time.sleep(0.0005)
            self._settle()
        return self._used_bytes[tier]

    def _refuse_beyond_budget(self, used: int, nbytes: int, tier: Tier, where: str) -> None:
        budget = self.budgets[tier]
        if used > budget:
            raise OutOfDeviceMemory(
                f"out of memory on the {tier} at {where}: {format_bytes(used)} in use with this "
                f"{format_bytes(nbytes)}, budget {format_bytes(budget)}",
                tier=tier,
            )

    def _settle(self) -> None:
        """Take off what has died, under the lock."""
        while self._gone:
            counted = self._gone.popleft()
            if not hasattr(counted, "key"):
                continue  # an interrupt came before it was counted
            key = counted.key
            if self._remembered.get(key) is counted:
                self._remembered = {}
            # What was let go at the start of a step counts no more.
            if self._storages.get(key) is counted:
                del self._storages[key]
                self._change(counted.tier, -counted.nbytes)

    def _change(self, tier: Tier, nbytes: int) -> int:
        used = self._used_bytes[tier] = self._used_bytes[tier] + nbytes
        self._curve[tier].add(time.perf_counter(), used)
        return used


class MeteredGraph:
    """Runs a graph of ops; values are freed after their last use."""

    def __init__(self, module: fx.GraphModule, tier: Tier) -> None:
        graph = module.graph
        self.graph = graph
        self._tier = tier
        self._inputs = graph.find_nodes(op="placeholder")
        self._constants = {
            node: attrgetter(str(node.target))(module) for node in graph.find_nodes(op="get_attr")
        }
        done_with = last_uses(graph)
        self._ops = [
            (node, bound(node), not returns_argument_memory(node), done_with.get(node, ()))
            for node in graph.nodes
            if node.op == "call_function"
        ]
        self._results = graph.output_node().args[0]

    def __call__(self, inputs: Sequence[Any], meter: MemoryMeter) -> Any:
        """What the graph returns. Raises `OutOfDeviceMemory` where a result passes the budget."""
        values = {**self._constants, **dict(zip(self._inputs, inputs, strict=True))}
        for node, compute, is_new, done_with in self._ops:
            values[node] = compute(values)
            if is_new:
                meter.track(values[node], self._tier, node.name)
            for unused in done_with:
                del values[unused]
        return fx.node.map_arg(self._results, values.__getitem__)


def last_uses(graph: fx.Graph) -> dict[fx.Node, list[fx.Node]]:
    """For each node the values that it is the last to use, its own where nobody does."""
    seen: set[fx.Node] = set()
    found: dict[fx.Node, list[fx.Node]] = {}
    for node in reversed(graph.nodes):
        for value in (node, *node.all_input_nodes):
            if value not in seen:
                seen.add(value)
                found.setdefault(node, []).append(value)
    return found

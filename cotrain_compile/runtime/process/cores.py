"""Cores: on which cores of the computer a thread runs, with those that torch starts for it.

In: core numbers. A thread that torch starts to share work inherits the cores of the thread it works
for, so binding the threads of the host lane, before their first work, binds all of an update. The
kernel gives a thread memory of the node that it runs on, so what is bound to the cores of a node
has its memory there too.

Memory nodes: the parts of a computer's memory with cores of their own (NUMA), beside a card.

In: what Linux shows of nodes and of the card's place on the PCI bus. Out: the cores beside the
card. A copy to a card from the memory of another processor goes through both, and an update of what
lies there does too: pinned memory and the host's work keep to the node that the card is on.
"""

from __future__ import annotations

import os
import threading
import warnings
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch


@dataclass(frozen=True)
class Cores:
    """The cores that work keeps to, and how many threads share it; none: as the system likes."""

    numbers: frozenset[int] = frozenset()
    threads: int = 0

    @staticmethod
    def one_thread_each(numbers: Iterable[int]) -> Cores:
        """As many threads as cores: they are for this work alone."""
        cores = frozenset(numbers)
        return Cores(cores, len(cores))


ANY_CORE = Cores()


def usable_cores() -> frozenset[int]:
    """The cores that this process may run on."""
    return frozenset(os.sched_getaffinity(0))


def bind_this_thread(cores: Cores) -> None:
    """Let the calling thread share its work among `cores.threads` threads, on those cores alone.

    No other thread notices, not even one that starts later.
    """
    if not cores.numbers:
        return
    try:
        os.sched_setaffinity(0, cores.numbers)
    except OSError as error:  # they were there when the options were read
        told = sorted(cores.numbers)
        warnings.warn(f"host_cores {told} are not used: {error.strerror}", stacklevel=1)
        return
    before = torch.get_num_threads()
    torch.set_num_threads(cores.threads)
    # It is also noted for threads to come. From a thread that ends, the note is put back alone.
    restore = threading.Thread(target=torch.set_num_threads, args=(before,))
    restore.start()
    restore.join()


def run_on(cores: Cores, work: Callable[[], object]) -> None:
    """Do `work` on `cores`, and return when it is done; the calling thread stays where it is."""
    if not cores.numbers:
        work()
        return
    with ThreadPoolExecutor(1, "cotrain-bound", bind_this_thread, (cores,)) as bound:
        bound.submit(work).result()


SYSTEM = Path("/sys")


def memory_nodes() -> Mapping[int, frozenset[int]]:
    """The cores of each node, by its number; memory without cores, as a card's own, is left out."""
    found = {}
    for folder in (SYSTEM / "devices/system/node").glob("node[0-9]*"):
        cores = _numbers(_text(folder / "cpulist"))
        if cores:
            found[int(folder.name.removeprefix("node"))] = cores
    return dict(sorted(found.items()))


def node_of_card(properties: Any) -> int | None:
    """The node beside the card with torch's `properties`; None where nobody says which it is."""
    try:
        domain, bus = int(properties.pci_domain_id), int(properties.pci_bus_id)
        device = int(properties.pci_device_id)
    except AttributeError:
        return None  # a build of torch that does not say where the card is
    address = f"{domain:04x}:{bus:02x}:{device:02x}.0"
    told = _text(SYSTEM / "bus/pci/devices" / address / "numa_node")
    node = int(told) if told.lstrip("-").isdigit() else -1
    return node if node in memory_nodes() else None


def cores_beside(properties: Any) -> Cores:
    """Those of the card's node that this process may run on, where there are several nodes.

    They are shared with whatever else runs there, so torch's own number of threads is the most.
    Without several nodes, or without such cores, any core will do.
    """
    nodes, node = memory_nodes(), node_of_card(properties)
    if len(nodes) < 2 or node is None:
        return ANY_CORE
    cores = nodes[node] & usable_cores()
    return Cores(cores, min(len(cores), torch.get_num_threads())) if cores else ANY_CORE


def as_ranges(cores: frozenset[int]) -> str:
    """Core numbers as Linux writes them: "0-15, 32-47"."""
    ordered, ranges = sorted(cores), list[str]()
    while ordered:
        count = 1
        while count < len(ordered) and ordered[count] == ordered[0] + count:
            count += 1
        ranges.append(f"{ordered[0]}-{ordered[count - 1]}" if count > 1 else str(ordered[0]))
        ordered = ordered[count:]
    return ", ".join(ranges)


def _numbers(ranges: str) -> frozenset[int]:
    found: set[int] = set()
    for part in ranges.split(","):
        first, _, last = part.strip().partition("-")
        if first.isdigit():
            found.update(range(int(first), int(last or first) + 1))
    return frozenset(found)


def _text(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""

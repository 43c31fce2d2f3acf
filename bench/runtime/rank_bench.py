"""Rank bench: what ranks on a network of their own measure, from the command line to the report.

The bench starts itself anew on that network; there it spawns ranks over gloo, which leave JSON in a
folder.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.multiprocessing.spawn import spawn

from bench.report import write_report
from bench.runtime.own_network import on_own_network
from cotrain_compile.machine import Network

# What a rank does: its number, the folder, the rate of the network, how often.
Train = Callable[[int, str, str, int], None]


@dataclass(frozen=True)
class RankBench:
    """The bench `python -m module`: so many ranks for each of `trainings`, one after the other.

    `network` gives the shell commands that make a network of some rate, `collected` the result
    from the folder, and `table` what is printed of it.
    """

    module: str
    told: str
    trainings: Sequence[tuple[Train, int]]
    network: Callable[[str], str]
    rate: str
    rounds: int
    collected: Callable[[Path], dict[str, Any]]
    table: Callable[[Mapping[str, Any]], str]

    def main(self, arguments: Sequence[str] | None = None) -> None:
        """Measure, print the table, and write the report."""
        question = self.told.splitlines()[0]
        parser = argparse.ArgumentParser(description=question)
        parser.add_argument("-o", "--output", type=Path)
        parser.add_argument("--rate", default=self.rate, help="of the network, as tc has it")
        parser.add_argument("--rounds", type=int, default=self.rounds)
        parser.add_argument("--worker", help=argparse.SUPPRESS)
        given = parser.parse_args(arguments)
        if given.worker is not None:
            for train, ranks in self.trainings:
                spawn(train, (given.worker, given.rate, given.rounds), nprocs=ranks)
            return
        with tempfile.TemporaryDirectory() as folder:
            asked = ["--worker", folder, "--rounds", str(given.rounds), "--rate", given.rate]
            on_own_network(self.module, asked, self.network(given.rate))
            result = self.collected(Path(folder))
        result |= {"rate": given.rate, "rounds": given.rounds}
        print(self.table(result))
        if given.output is not None:
            write_report(given.output, question, result)


def start(rank: int, ranks: int, store: Path) -> None:
    """This process becomes a rank over gloo, with one thread; `store` is a file for all of them."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=ranks)


def measured_hop(rank: int, nbytes: int, *, at_once: bool = False) -> Network:
    """What rank 0 and rank 1 send to each other: two sizes, back and forth, the median of each.

    Or both send `at_once`, as in exchanges of all ranks.
    """
    sizes = (64, nbytes)
    medians = []
    for size in sizes:
        data, taken = torch.zeros(size, dtype=torch.uint8), []
        for _ in range(12):
            dist.barrier()
            time.sleep(0.01)  # the network is idle between two sends of a pipeline, too
            began_s = time.perf_counter()
            if at_once and rank < 2:
                sent = dist.isend(data, 1 - rank)
                dist.recv(torch.empty_like(data), 1 - rank)
                assert sent is not None  # this rank is in the group
                sent.wait()
            elif rank < 2:
                for sender in range(2):
                    (dist.send if rank == sender else dist.recv)(data, 1 - rank)
            taken.append((time.perf_counter() - began_s) / (1 if at_once else 2))
        medians.append(statistics.median(taken[2:]))
    least, most = medians
    told = torch.tensor([least, (most - least) / (sizes[1] - sizes[0])], dtype=torch.float64)
    dist.broadcast(told, 0)
    latency_s, byte_s = told.tolist()
    return Network(1 / byte_s, latency_s)


def compared(
    case: str,
    predicted_s: float,
    ranks: Sequence[Mapping[str, Any]],
    planned_bytes: Mapping[str, Sequence[int]],
    hop: Network,
) -> dict[str, Any]:
    """A step as planned beside what each rank found: its `step_s`, and `<name>_bytes` it moved."""
    measured_s = max(of_rank["step_s"] for of_rank in ranks)
    return {
        "case": case,
        "predicted_s": predicted_s,
        "measured_s": measured_s,
        "time_error": predicted_s / measured_s - 1,
        "planned_bytes": planned_bytes,
        "moved_bytes": {
            name: [of_rank[f"{name}_bytes"] for of_rank in ranks] for name in planned_bytes
        },
        "hop_bytes_per_s": hop.bytes_per_s,
        "hop_s": hop.latency_s,
        "ranks": list(ranks),
    }

"""Do steps take what plans of a cluster say? On devices, links and a network that are slow.

Processes with gloo train a residual MLP: in stages on two ranks (`runs_of_stages`), with layers of
two widths on two ranks, and as two workers with a CPU helper (`runs_of_exchanges`). All of it is
throttled, so that other work on the machine counts little: a layer takes 30 ms forward and 60 ms
backward with 64 samples, and each rank has a network card that sends and receives `--rate`.

Told are step times (the median), the peaks of all turns as planned and as metered, and the bytes
that ranks send and swap. It needs root, `unshare`, `nsenter`, `ip` and `tc`.

    python -m bench.runtime.cluster_runs -o bench/results/cluster_runs.json
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch.distributed as dist

from bench.results_page.tables import markdown
from bench.runtime import runs_of_exchanges, runs_of_stages
from bench.runtime.own_network import HUB, take_card
from bench.runtime.rank_bench import RankBench, measured_hop, start
from bench.runtime.runs_of_exchanges import HELPERS, WIDTHS, WORKERS
from bench.runtime.slow_model import LAYER_BYTES, LAYERS
from cotrain_compile.support.units import format_bytes, format_seconds

WARM_UP = 1


def train_stages(rank: int, folder: str, rate: str, rounds: int) -> None:
    """On one of two ranks: all cases of stages in turn."""
    _join(rank, runs_of_stages.RANKS, Path(folder), rate)
    hop = measured_hop(rank, runs_of_stages.HOP_BYTES)
    runs = runs_of_stages.made(Path(folder, f"machine{rank}.json"))
    for number in range(WARM_UP + rounds):
        for run in runs:
            run.step(counts=number >= WARM_UP)
    _leave(
        rank, Path(folder), [runs_of_stages.record(r.case, _of_all(r.found()), hop) for r in runs]
    )


def train_widths(rank: int, folder: str, rate: str, rounds: int) -> None:
    """On one of two ranks."""
    _join(rank, max(WIDTHS.values()), Path(folder), rate)
    hop = measured_hop(rank, runs_of_exchanges.SUMMED_BYTES, at_once=True)
    taken_s = runs_of_exchanges.wide_steps(WARM_UP + rounds)
    of_all = _of_all({"step_s": statistics.median(taken_s[WARM_UP:])})
    _leave(rank, Path(folder), [runs_of_exchanges.wide_record(of_all, hop)])


def train_with_helper(rank: int, folder: str, rate: str, rounds: int) -> None:
    """On one of the workers, or the helper behind them, which takes as long as they do."""
    _join(rank, WORKERS + HELPERS, Path(folder), rate)
    hop = measured_hop(rank, LAYERS * LAYER_BYTES, at_once=True)
    taken_s, exchange = runs_of_exchanges.helped_steps(WARM_UP + rounds)
    of_all = _of_all(
        {
            "step_s": statistics.median(taken_s[WARM_UP:]) if taken_s else 0.0,
            "sent_bytes": exchange.sent_bytes // (WARM_UP + rounds),
            "planned_bytes": exchange.planned_bytes,
        }
    )
    _leave(rank, Path(folder), [runs_of_exchanges.helped_record(of_all, hop)])


TRAININGS = (
    (train_stages, runs_of_stages.RANKS),
    (train_widths, max(WIDTHS.values())),
    (train_with_helper, WORKERS + HELPERS),
)


def _join(rank: int, ranks: int, folder: Path, rate: str) -> None:
    """This process becomes a rank with a network card of its own."""
    take_card(rank, rate)
    done = len(list(folder.glob("found*.json")))
    start(rank, ranks, folder / f"store{done}")


def _of_all(found: Mapping[str, Any]) -> list[Any]:
    of_all: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(of_all, found)
    return of_all


def _leave(rank: int, folder: Path, records: Sequence[Mapping[str, Any]]) -> None:
    if rank == 0:
        done = len(list(folder.glob("found*.json")))
        (folder / f"found{done}.json").write_text(json.dumps(records))
    dist.barrier()
    dist.destroy_process_group()


def collected(folder: Path) -> dict[str, Any]:
    """The records of all trainings, with the worst of them."""
    records = [
        record
        for path in sorted(folder.glob("found*.json"))
        for record in json.loads(path.read_text())
    ]
    return {
        "records": records,
        "summary": {
            "time_error_worst": max(abs(each["time_error"]) for each in records),
            "peak_error_worst": max(each.get("peak_error", 0.0) for each in records),
            "bytes_as_planned": all(e["planned_bytes"] == e["moved_bytes"] for e in records),
        },
    }


def table(result: Mapping[str, Any]) -> str:
    """A row for each case."""
    rows = [
        (
            each["case"],
            format_seconds(each["predicted_s"]),
            format_seconds(each["measured_s"]),
            f"{100 * each['time_error']:+.1f} %",
            _peak(each),
            _moved(each, "sent"),
            _moved(each, "fetched", "home"),
        )
        for each in result["records"]
    ]
    headings = ("plan", "predicted", "measured", "error", "largest peak of a turn, error")
    rates = [each["hop_bytes_per_s"] / 1e6 for each in result["records"]]
    told = (
        f"From rank to rank go {min(rates):.1f} to {max(rates):.1f} MB a second, as measured with "
        "the bytes of a hop, or of an exchange in both directions at once. Bytes are of each rank "
        "in a step, as planned and as counted; where these differ, both are told. A peak is that "
        "of a turn, with what other stages have on the device meanwhile."
    )
    return "\n".join((markdown((*headings, "sent", "fetched, sent home"), rows), told))


def _peak(each: Mapping[str, Any]) -> str:
    if "peak_bytes" not in each:
        return ""
    return f"{format_bytes(each['peak_bytes'])}, {100 * each['peak_error']:.1f} %"


def _moved(each: Mapping[str, Any], *names: str) -> str:
    return ", ".join(
        _as_counted(each["planned_bytes"][name], each["moved_bytes"][name])
        for name in names
        if name in each["planned_bytes"]
    )


def _as_counted(planned: list[int], moved: list[int]) -> str:
    if planned != moved:
        return f"{moved} for {planned}"
    return " and ".join(dict.fromkeys(map(format_bytes, moved)))


BENCH = RankBench(
    "bench.runtime.cluster_runs",
    __doc__ or "",
    TRAININGS,
    network=lambda rate: HUB,
    rate="30mbit",
    rounds=3,
    collected=collected,
    table=table,
)
main: Callable[..., None] = BENCH.main

if __name__ == "__main__":
    main()

"""Tables of the results page: from the `result` of each benchmark's JSON to Markdown.

One function for each benchmark. Where a peer or a simple rule wins, the words below the table say
why. What they say about numbers is computed here, so that it stays true for the next run.
"""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from itertools import combinations, groupby
from typing import Any

from cotrain_compile.support.units import format_bytes, format_seconds

Result = Mapping[str, Any]


def markdown(headings: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """A Markdown table; the first column is text, the others are numbers."""
    lines = [headings, ["---", *["---:"] * (len(headings) - 1)], *rows]
    return "\n".join("| " + " | ".join(map(str, cells)) + " |" for cells in lines) + "\n"


def percent(share: float) -> str:
    """`0.0372` -> "3.7 %"."""
    return f"{100 * share:.1f} %"


def times(factor: float) -> str:
    """`1.2345` -> "1.23 ×"."""
    return f"{factor:.2f} ×"


def placement(result: Result) -> str:
    """How far plans are from their bound, for each step and machine."""
    rows = []
    by_case = groupby(result["rows"], key=lambda row: (row["model"], row["machine"]))
    for (model, machine), group in by_case:
        found = list(group)
        gaps = [row["gap"] for row in found if row["gap"] is not None]
        sizes = [row["budget_bytes"] for row in found]
        rows.append(
            (
                f"{model}, {machine}",
                f"{format_bytes(min(sizes))} to {format_bytes(max(sizes))}",
                percent(statistics.median(gaps)),
                percent(max(gaps)),
                sum(any(isinstance(s, float) for s in row["rules_s"].values()) for row in found),
                format_seconds(statistics.median(row["seconds"] for row in found)),
                _median_seconds(row.get("processor_s") for row in found),
            )
        )
    headings = (
        "step and machine",
        "budgets",
        "above the bound, median",
        "worst",
        "budgets at which a simple rule fits",
        "solved in, median",
        "processor, median",
    )
    count = len(result["rows"])
    fitting = count - result["summary"]["no_rule_fits"]
    return markdown(headings, rows) + (
        f"\n{result['summary']['bounds_beaten']} of {count} plans are below their certified bound. "
        f"At {fitting} budgets a simple rule fits at all; the fastest one that does takes "
        f"{result['summary']['speedup_median']:.2f} times as long in the median, and "
        f"{result['summary']['speedup_best']:.2f} times at best for us. Why some rows are far from "
        "their bound is in [the placement problem](placement.md#how-good-the-plans-are).\n"
    )


def _median_seconds(seconds: Iterable[float | None]) -> str:
    """In words, where all are known."""
    known = list(seconds)
    found = [each for each in known if each is not None]
    return format_seconds(statistics.median(found)) if len(found) == len(known) else "-"


def simulated_vs_measured(result: Result) -> str:
    """Predicted and measured steps of every plan, model by model."""
    rows = [
        (
            f"{r['model']}, {r['link']}, {r['plan']}",
            format_seconds(r["predicted_s"]),
            format_seconds(r["measured_s"]["median"]),
            f"{100 * r['time_error']:+.1f} %",
            format_bytes(r["measured_peak_bytes"]),
            f"{r['predicted_peak_bytes'] - r['measured_peak_bytes']:+d} B",
        )
        for r in result["records"]
    ]
    headings = ("model, link, plan", "predicted", "measured", "error", "peak", "peak predicted")
    summary = result["summary"]
    return markdown(headings, rows) + (
        f"\nThe predicted time is off by {percent(summary['time_error_median'])} in the median and "
        f"{percent(summary['time_error_worst'])} at worst.{_beaten_by_rules(result['records'])}\n"
        f"\n{_ranks(result['records'])}\n"
    )


def _ranks(records: Sequence[Mapping[str, Any]]) -> str:
    """How well the order of plans by predicted time is that by measured time."""
    models = list(dict.fromkeys(r["model"] for r in records))
    within = [_tau([r for r in records if r["model"] == model]) for model in models]
    each = ", ".join(f"{tau:.2f} of {model}" for tau, model in zip(within, models, strict=True))
    return (
        f"Kendall's tau of predicted and measured times is {_tau(records):.2f} over all "
        f"{len(records)} plans; within a model, whose plans are mostly nearer to each other than "
        f"predictions are to them, {each}."
    )


def _tau(records: Sequence[Mapping[str, Any]]) -> float:
    """Pairs in the same order less those in the other, as a part of both (Kendall 1938).

    1 where no pair has an order in both.
    """
    pairs = combinations([(r["predicted_s"], r["measured_s"]["median"]) for r in records], 2)
    ways = [(p - q) * (m - n) for (p, m), (q, n) in pairs]
    same, other = sum(way > 0 for way in ways), sum(way < 0 for way in ways)
    return (same - other) / (same + other) if same + other else 1.0


def _beaten_by_rules(records: Sequence[Result]) -> str:
    """A sentence about simple rules that were measured faster than `auto`, in less memory too."""
    beaten = [
        f"{rule['plan']} for {auto['model']}"
        for auto in records
        if auto["plan"].startswith("auto")
        for rule in records
        if (rule["model"], rule["link"]) == (auto["model"], auto["link"])
        and rule["measured_s"]["median"] < auto["measured_s"]["median"]
        and rule["measured_peak_bytes"] <= auto["measured_peak_bytes"]
    ]
    if not beaten:
        return " No simple rule is both faster than `auto` and in less memory."
    return (
        f" Faster than `auto` in no more memory: {', '.join(beaten)}. There the prediction that "
        "chose between them was off by more than they differ."
    )


def _told(steps_s: Mapping[str, float | None], way: str) -> str:
    """The step of a plan; "" where that way to plan was not tried."""
    if way not in steps_s:
        return ""
    seconds = steps_s[way]
    return format_seconds(seconds) if seconds else "no plan"


def recompute(result: Result) -> str:
    """Steps with nothing, with layers and with what the plan chooses made again."""
    tried = (
        "nothing",
        "every other layer",
        "every layer",
        "user's, every other layer",
        "user's, every layer",
        "one level",
        "ProTrain's blocks",
        "auto",
    )
    ways = [way for way in tried if any(way in cell["steps_s"] for cell in result["cells"])]
    rows, gains = [], []
    took = [cell["solve_s"] for cell in result["cells"]]
    planned = [cell for cell in result["cells"] if cell["steps_s"]["auto"] and cell["bound_s"]]
    above = [cell["steps_s"]["auto"] / cell["bound_s"] - 1 for cell in planned]
    for cell in result["cells"]:
        steps, bound_s = cell["steps_s"], cell["bound_s"]
        auto_s, nothing_s = steps["auto"], steps["nothing"]
        gain = nothing_s / auto_s if auto_s and nothing_s else None
        gains += [] if gain is None else [gain]
        again = f"{format_bytes(cell['recomputed_bytes'])} in {format_seconds(cell['redo_s'])}"
        rows.append(
            (
                f"{cell['model']}, {cell['machine']}, {format_bytes(cell['budget_bytes'])}",
                *(_told(steps, way) for way in ways),
                times(gain) if gain else "",
                again if cell["recomputed_bytes"] else "nothing",
                percent(auto_s / bound_s - 1) if auto_s and bound_s else "",
            )
        )
    headings = ["step, machine, device memory", *ways, "gain", "made again", "above the bound"]
    worse = sum(
        cell["steps_s"]["auto"] > 1.0001 * min(s for s in cell["steps_s"].values() if s)
        for cell in result["cells"]
        if cell["steps_s"]["auto"]
    )
    told = (
        f"The gain is that of `auto` over the plan that makes nothing again: {times(min(gains))} "
        f"to {times(max(gains))}, the median {times(statistics.median(gains))}. In {worse} of "
        f"{len(rows)} rows another column is faster. The distance from the bound is "
        f"{percent(statistics.median(above))} in the median and {percent(max(above))} at worst; "
        f"plans are found in {format_seconds(statistics.median(took))}, the median, to "
        f"{format_seconds(max(took))} by the clock{_of_processors(result['cells'])}.\n"
    )
    return markdown(headings, rows) + "\n" + told + _beside_monet(result.get("alone", ()))


def _of_processors(cells: Sequence[Mapping[str, Any]]) -> str:
    """What finding plans took of all processors, of those plans of which that is known."""
    known = [cell["processor_s"] for cell in cells if cell.get("processor_s")]
    if not known:
        return ""
    most = format_seconds(max(known))
    return f", in {format_seconds(statistics.median(known))} to {most} of processors"


def _beside_monet(records: Sequence[Mapping[str, Any]]) -> str:
    """What convolutional nets take longer in less memory, beside MONeT's table and POFO's link."""
    if not records:
        return ""

    def told(overhead: float | None) -> str:
        return "no plan" if overhead is None else percent(overhead)

    rows = [
        (
            f"{record['model']}, {percent(record['share'])}",
            told(record["overhead"]),
            "" if record["published"] is None else percent(record["published"]),
            told(record["with_link"]),
        )
        for record in records
    ]
    headings = ("step, share of the memory for all", "longer by", "published for MONeT")
    return "\n" + markdown((*headings, "longer with a host at 12 GB/s"), rows)


def host_update_peers(result: Result) -> str:
    """Milliseconds of every kernel, and how fast ours is beside each."""
    records = result["records"]
    names = list(dict.fromkeys(name for record in records for name in record["seconds"]))
    rows = []
    for record in records:
        found = record["seconds"]
        cells = [f"{1e3 * found[n]['quiet_median']:.2f}" if n in found else "-" for n in names]
        size = f"{record['parameters'] / 1e6:.0f}M"
        threads = f"{record['threads']} thread{'s' if record['threads'] > 1 else ''}"
        rows.append((f"{size}, {record['gradient']}, {threads}", *cells))
    ratios = {
        name: [r["ours_against"][name] for r in records if name in r["ours_against"]]
        for name in names
        if name not in ("ours", "limit")
    }
    told = "; ".join(
        f"{name} {times(min(found))} to {times(max(found))}" for name, found in ratios.items()
    )
    versions = ", ".join(f"{name} {version}" for name, version in result["peers"].items())
    return (
        "Milliseconds for one AdamW update, the median of the fastest fifth; the limit is a copy "
        "of as many bytes.\n\n"
        + markdown(("parameters, gradient, threads", *names), rows)
        + f"\nOurs against each (above 1: ours is faster): {told}."
        f" Peers: {versions or 'none installed'}.{_peers_that_win(ratios)}\n"
    )


def _peers_that_win(ratios: Mapping[str, Sequence[float]]) -> str:
    reasons = {
        "torch fused": "ours runs the same loop of ATen's, after what it takes to start an op of "
        "the graph (some 20 µs), and widens a gradient piece by piece, where the peer is given a "
        "second gradient in float32 to keep",
        "DeepSpeed": "its loop is compiled for this very processor, which counts while the tensors "
        "fit the cache; from 10M on memory sets the pace. Ours is ATen's loop, so that nothing is "
        "built at install",
        "torch foreach": "it starts sooner, and its temporaries fit the cache",
    }
    lost = [name for name, found in ratios.items() if min(found) < 0.95]
    told = (f" Where {name} wins: {reasons[name]}." for name in lost if name in reasons)
    return "".join(told)


def host_update(result: Result) -> str:
    """Our kernels against the same work op by op, and gaps of another thread."""
    rows = [
        (
            r["case"],
            *(format_seconds(r["seconds"][n]["median"]) for n in ("copy", "update alone", "ours")),
            times(r["of_op_by_op"]["median"]),
            format_seconds(r["gap_s"]["ours"]["max"]),
            format_seconds(r["gap_s"]["nothing"]["max"]),
        )
        for r in result["records"]
    ]
    headings = ("case", "copy", "update alone", "ours", "speed of op by op", "gap", "idle gap")
    return markdown(headings, rows) + (
        "\n*Gap*: the longest time in which a thread in Python stood still meanwhile; *idle gap*: "
        "the same while nothing is updated. *Update alone* has a gradient that is ready; ours "
        "widens and clips it too.\n"
    )


def coarse_against_zero_offload(result: Result) -> str:
    """Both plans, predicted and measured."""
    rows = [
        (name, format_seconds(p["predicted_s"]), format_seconds(p["measured_s"]["median"]))
        for name, p in result["plans"].items()
    ]
    ratio = result["measured_ratio"]
    return markdown(("plan", "predicted", "measured"), rows) + (
        f"\nEarly updates take {times(ratio['median'])} of ZeRO-Offload's step measured, "
        f"{times(result['predicted_ratio'])} predicted.\n"
    )


def overlap(result: Result) -> str:
    """The simulated step and period of each policy and machine."""
    rows = [
        (
            f"{r['machine']}, {r['budget_gib']} GiB, {r['policy']}",
            format_seconds(r["step_s"]),
            format_seconds(r["period_s"]),
            percent(r["gain"]),
        )
        for r in result["simulated"]["records"]
    ]
    return markdown(("machine, budget, policy", "one step", "period overlapped", "gain"), rows)


def pieces(result: Result) -> str:
    """One large parameter as a whole and in pieces, and what a tiny copy costs by itself."""
    found = result["pieces"]
    rows = [
        ("its gradient crosses the link in", format_seconds(found["link_s"])),
        ("a step with its tasks one after the other", format_seconds(found["whole_s"])),
        ("a step with its tasks in pieces", format_seconds(found["in_pieces_s"])),
    ]
    rows += [
        (f"processor time of a tiny copy, {name}", f"{microseconds:.0f} µs")
        for name, microseconds in result["cpu_us_a_tiny_copy"].items()
    ]
    size = format_bytes(found["parameter_bytes"])
    return markdown((f"a parameter of {size}", "time"), rows) + (
        "\nWhat is cut and what is not: [decision 17](decisions/0017-pieces-and-bundles.md).\n"
    )


def long_run(result: Result) -> str:
    """Steps, memory and the largest difference of losses."""
    rows = [
        ("steps", result["steps"]),
        ("resumed at", result["resumed_at"]),
        ("resident needs", format_bytes(result["resident_bytes"])),
        ("budget", format_bytes(result["budget_bytes"])),
        ("measured peak", format_bytes(result["measured_peak_bytes"])),
        ("largest difference of losses", f"{result['largest_difference']:.2g}"),
    ]
    return markdown(("", "value"), rows)


def loss_curves(result: Result) -> str:
    """The largest relative difference of losses from eager's."""
    differences = result["largest_relative_difference"]
    rows = [(side, f"{value:.1g}") for side, value in differences.items() if side != "eager"]
    return markdown(("captured by", "largest relative difference of losses"), rows)


def matrix(result: Result) -> str:
    """How many cells came out equal; the whole of it is a page of its own."""
    count = Counter(cell["status"] for cell in result["cells"])
    rows = [(status, count[status]) for status in ("equal", "rounding", "different", "refused")]
    return markdown(("loops", "cells"), rows) + "\nCell by cell: [the matrix](matrix.md).\n"


def gpu_suite(result: Result) -> str:
    """Rows of the card: ours and peers, the largest models, and what failed."""
    ours, peers = result.get("performance", []), result.get("peers", [])
    rows = [
        (
            row["name"],
            *(f"{row[key]:.3f} s" if key in row else "-" for key in ("predicted_s", "measured_s")),
            format_bytes(row["allocator_peak_bytes"]) if "allocator_peak_bytes" in row else "-",
            percent(row["busy"]) if "busy" in row else "-",
            row.get("error") or row.get("remark", ""),
        )
        for row in [*ours, *peers]
        if row["name"] != "capture"
    ]
    largest = [
        (row["name"], row.get("error") or f"{row['parameters'] / 1e9:.1f}")
        for row in result.get("largest", [])
    ]
    timed = ("row", "predicted", "measured", "peak", "card computes", "")
    return (
        markdown(timed, rows)
        + "\n"
        + markdown(("way, memory of the card", "largest, G parameters"), largest)
    )

"""What the results page says of plans and steps: from the `result` of a JSON to a few sentences.

A table only where its rows carry a claim; every figure is in the JSON beside it. What is said about
numbers is computed here, so that it stays true for the next run.
"""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from itertools import combinations
from typing import Any

from cotrain_compile.plan.on_disk import ROOMS
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


def _range(values: Iterable[float], tell: Any = times) -> str:
    found = list(values)
    return f"{tell(min(found))} to {tell(max(found))}"


def placement(result: Result) -> str:
    """How far plans are from their bound."""
    rows, told = result["rows"], result["summary"]
    gaps = [row["gap"] for row in rows if row["gap"] is not None]
    return (
        f"Of {len(rows)} plans {told['bounds_beaten']} are below their certified bound; they are "
        f"{percent(statistics.median(gaps))} above it in the median, {percent(max(gaps))} at "
        f"worst. At {len(rows) - told['no_rule_fits']} budgets a simple rule fits; the fastest "
        f"one takes {times(told['speedup_median'])} as long in the median. "
        "More: [the placement problem](placement.md#how-good-the-plans-are).\n"
    )


def tight(result: Result) -> str:
    """Plans in 1 to 1.25 times the least memory."""
    told = []
    for again, name in ((False, "nothing recomputed"), (True, "recomputation")):
        gaps = [r["gap"] for r in result["rows"] if r["recompute"] is again and r["gap"]]
        told.append(
            f"with {name} {percent(statistics.median(gaps))} above their bounds in the median, "
            f"{percent(max(gaps))} at worst"
        )
    return f"In 1 to 1.25 times the least memory plans are, {'; '.join(told)}.\n"


def campaign(result: Result) -> str:
    """Steps that were looked at after the search had been made, by their budgets."""
    told, found = result["summary"], list[str]()
    for budget, words in (
        ("1.1x", "1.1 times the least memory"),
        ("1.1x whole", "1.1 times the least of whole ops"),
        ("0.5", "half of all memory"),
    ):
        rows = [row for row in result["rows"] if row["budget"] == budget and row["bound_s"]]
        gaps = [row["step_s"] / row["bound_s"] - 1.0 for row in rows]
        seconds = [row["processor_s"] for row in rows]
        found.append(
            f"{len(rows)} cells in {words}: {percent(statistics.median(gaps))} above the bound in "
            f"the median, {percent(max(gaps))} at worst, in {statistics.median(seconds):.0f} s of "
            f"processors ({max(seconds):.0f} s)."
        )
    return " ".join(found) + (
        f" In {told['users_fit']} cells checkpoints with a simple rule fit; "
        f"{told['slower_than_users']} plans are slower than those.\n"
    )


def recompute(result: Result) -> str:
    """What recomputation gains, beside the same budget without and with checkpoints."""
    cells = result["cells"]
    both = [c for c in cells if c["steps_s"]["auto"] and c["steps_s"]["nothing"]]
    gains = [c["steps_s"]["nothing"] / c["steps_s"]["auto"] for c in both]
    best = ("every layer", "every other layer", "user's, every layer", "user's, every other layer")
    layers = [
        min(c["steps_s"][way] for way in best if c["steps_s"].get(way)) / c["steps_s"]["auto"]
        for c in both
    ]
    return (
        f"Over {len(cells)} budgets `auto` is {_range(gains)} as fast as the best plan that "
        f"recomputes nothing (median {times(statistics.median(gains))}), and {_range(layers)} as "
        "fast as the best with a checkpoint around every layer or every other one.\n"
    )


def host_update_peers(result: Result) -> str:
    """Milliseconds of the largest update, and how fast ours is beside each peer."""
    records = result["records"]
    largest = max(record["parameters"] for record in records)
    shown = [record for record in records if record["parameters"] == largest]
    names = list(shown[0]["seconds"])
    rows = [
        (
            f"{record['gradient']}, {record['threads']} thread{'s' * (record['threads'] > 1)}",
            *(f"{1e3 * record['seconds'][n]['quiet_median']:.1f}" for n in names),
        )
        for record in shown
    ]
    peers = dict.fromkeys(name for record in records for name in record["ours_against"])
    told = "; ".join(
        f"{name} {_range(r['ours_against'][name] for r in records if name in r['ours_against'])}"
        for name in peers
        if name != "limit"
    )
    versions = ", ".join(f"{name} {version}" for name, version in result["peers"].items())
    return (
        f"Milliseconds for AdamW of {largest / 1e6:.0f}M parameters; the limit is a copy of as "
        f"many bytes.\n\n{markdown(('gradient', *names), rows)}\nOver all sizes ours is as fast "
        f"as: {told}. Peers: {versions or 'none installed'}. Where a peer wins, its loop is built "
        "for this processor and the tensors fit the cache, or it is handed a gradient that is "
        "already float32; ours is ATen's loop.\n"
    )


def host_update(result: Result) -> str:
    """Our kernels against the same work op by op, and gaps of another thread."""
    told = result["summary"]
    return (
        f"{_range(r['of_op_by_op']['median'] for r in result['records'])} as fast as the same ops "
        f"one by one. The longest that a thread in Python stood still meanwhile: "
        f"{format_seconds(told['gap_worst_s'])}, {format_seconds(told['gap_with_nothing_worst_s'])}"
        " while nothing is updated.\n"
    )


def simulated_vs_measured(result: Result) -> str:
    """How far predicted steps are off, and whether they rank plans."""
    records, told = result["records"], result["summary"]
    pairs = list(combinations(records, 2))
    alike = [(one, other) for one, other in pairs if one["model"] == other["model"]]
    apart = [pair for pair in alike if _is_told_apart(*(r["measured_s"] for r in pair))]
    return (
        f"{len(records)} steps on the emulated device; times are off by "
        f"{percent(told['time_error_median'])} in the median, {percent(told['time_error_worst'])} "
        f"at worst. Kendall's tau of predicted and measured times is {_tau(pairs):.2f}; "
        f"of plans for one model {_tau(alike):.2f}, and {_tau(apart):.2f} of the {len(apart)} "
        f"pairs of {len(alike)} that measurements tell apart."
        f"{_beaten_by_rules(records)}\n"
    )


# Of classes of ops.
_CLASSES_TOLD = 8


def processor_steps(result: Result) -> str:
    """Measured, and predicted over measured by each way; and by class of op."""
    lists = result["off, median"]
    ways = list(lists["first list"])
    rows = [
        (row["step"], f"{row['measured_ms']:.1f} ms", *(f"{row[way]:.2f} ×" for way in ways))
        for row in result["steps"]
    ]
    off = "; ".join(
        f"of the {which} " + ", ".join(f"{percent(off)} by {way}" for way, off in by_way.items())
        for which, by_way in lists.items()
    )
    classes = ", ".join(
        f"{each['class']} {each['predicted']:.2f}" for each in result["classes"][:_CLASSES_TOLD]
    )
    return (
        f"{markdown(('step', 'measured', *ways), rows)}\n\n"
        f"Predicted over measured, in processor time of one core. Off in the median: {off}. By "
        f"calibration, of the classes of op that took longest: {classes}.\n"
    )


def _is_told_apart(one: Mapping[str, float], other: Mapping[str, float]) -> bool:
    """Whether every run that counts of one was faster than every one of the other."""
    return one["max"] < other["min"] or other["max"] < one["min"]


def _tau(pairs: Iterable[tuple[Result, Result]]) -> float:
    """Pairs in the same order less those in the other, as a part of both (Kendall 1938).

    1 where no pair has an order in both.
    """
    ways = [
        (a["predicted_s"] - b["predicted_s"])
        * (a["measured_s"]["median"] - b["measured_s"]["median"])
        for a, b in pairs
    ]
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
        f" Faster than `auto` in no more memory: {', '.join(beaten)}, where the prediction was off "
        "by more than they differ."
    )


def emulated(result: Result) -> str:
    """Any benchmark of records with a predicted and a measured step."""
    errors = [abs(r["time_error"]) for r in result["records"]]
    return (
        f"{len(errors)} steps; times are off by {percent(statistics.median(errors))} in the median "
        f"and {percent(max(errors))} at worst.\n"
    )


def coarse_against_zero_offload(result: Result) -> str:
    """Both plans, predicted and measured."""
    return (
        f"Updates that begin with their gradients take {times(result['measured_ratio']['median'])} "
        f"of ZeRO-Offload's step measured, {times(result['predicted_ratio'])} predicted.\n"
    )


def overlap(result: Result) -> str:
    """What deferring the host's updates into the next step gains."""
    gains = [r["gain"] for r in result["simulated"]["records"]]
    return (
        f"Simulated, Llama 1B on {len(gains)} machines and budgets: {_range(gains, percent)} less "
        f"time. Measured on the emulated device: {percent(result['emulated']['gain'])}, "
        f"{percent(result['emulated']['predicted_gain'])} predicted.\n"
    )


def speculation(result: Result) -> str:
    """What updates before the norm is known gain, and cost where they guess wrong."""
    rows = result["simulated"]
    gains = [1 - r["step_s"]["speculates"] / r["step_s"]["waits"] for r in rows]
    step_s = result["measured"]["step_s"]
    wrong = step_s["speculates, clipped"] / step_s["waits, clipped"]
    return (
        f"Simulated, {len(rows)} steps: {_range(gains, percent)} less time where the guess is "
        f"right. Measured on the emulated device: {times(wrong)} of a waiting step where all "
        "guesses are wrong.\n"
    )


def pieces(result: Result) -> str:
    """One large parameter as a whole and in chunks."""
    found = result["pieces"]
    return (
        f"A parameter of {format_bytes(found['parameter_bytes'])} whose gradient takes "
        f"{format_seconds(found['link_s'])} on the link: a step of "
        f"{format_seconds(found['whole_s'])} takes {format_seconds(found['in_pieces_s'])} in "
        "chunks.\n"
    )


def disk(result: Result) -> str:
    """A step bound by the drive."""
    swapped = " and ".join(
        f"{seconds:.2f} s ({name})" for name, seconds in result["deepspeed_s"].items()
    )
    # A parameter and both its states: some pieces of each, or the whole of three.
    rooms = format_bytes(3 * ROOMS * result["piece_bytes"])
    held = format_bytes(3 * result["disk_peak_bytes"] // 4)
    return (
        f"{format_bytes(result['bytes_moved_a_step'])} read and written in a step at "
        f"{times(result['of_raw_rate'])} of what the drive does with nothing in between; "
        f"{format_bytes(result['host_peak_bytes'])} of the host, {rooms} of them rooms. The "
        f"updates take {result['updates_s']:.2f} s, predicted "
        f"{times(result['predicted_over_measured'])} of that in the median, by the rates that the "
        "drive has at the moment. One parameter after the other takes "
        f"{result['by_hand_s']:.2f} s; DeepSpeed's `async_io`, in the order of its swapper, "
        f"{swapped} with {held} of buffers. Equal to states in memory after "
        f"{result['equal_after_steps']} steps: {'yes' if result['are_equal'] else 'no'}.\n"
    )


def split_ops(result: Result) -> str:
    """Peaks and seconds of the loss whole, by hand and in parts."""

    def predicted(row: Mapping[str, Any]) -> str:
        own_s = row.get("predicted_by_own_ops_s")
        return f"{100 * (own_s / row['step_s'] - 1):+.1f} %" if own_s else "-"

    rows = [
        (name, format_bytes(row["peak_bytes"]), f"{row['processor_s']:.2f} s", predicted(row))
        for name, row in result["steps"].items()
        if "peak_bytes" in row
    ]
    return f"A vocabulary of {result['vocabulary']:,}, {result['tokens']} tokens.\n\n" + markdown(
        ("loss", "peak of the step", "processor time", "predicted by its own ops"), rows
    )


def several_cards(result: Result) -> str:
    """Ranks of servers: how often each way fits, and ours beside the fastest other that does."""
    rows = result["rows"]
    ways = list(dict.fromkeys(way for row in rows for way in row["ways"]))
    fits = Counter(
        way for row in rows for way, found in row["ways"].items() if found and found["fits"]
    )
    told = ", ".join(f"{way} {fits[way]}" for way in ways)
    ratios = [
        min(others) / row["ways"]["ours"]["step_s"]
        for row in rows
        if (row["ways"].get("ours") or {}).get("fits")
        and (
            others := [
                found["step_s"]
                for way, found in row["ways"].items()
                if way != "ours" and found and found["fits"]
            ]
        )
    ]
    return (
        f"Simulated, {len(rows)} models and servers; fitting: {told}. Where another way fits too, "
        f"the fastest takes {_range(ratios)} as long as ours.\n"
    )


def six_clusters(result: Result) -> str:
    """The best strategy of each cluster for one model, and how often each is best."""
    fitting = [each for each in result["rows"] if each["strategies"][0]["fits"]]
    best = Counter(each["strategies"][0]["name"] for each in fitting)
    first = result["rows"][0]["model"]
    headings = (first, "best", "tokens/s", "useful", "second best takes")
    told = ", ".join(f"{name} in {count}" for name, count in best.items())
    return (
        markdown(headings, [_cluster(each) for each in fitting if each["model"] == first])
        + f"\nOf {len(result['rows'])} models and clusters {len(fitting)} fit; best is {told}. "
        "*Useful* is time in which devices compute what a step computes once.\n"
    )


def _cluster(each: Result) -> Sequence[str]:
    best, *others = each["strategies"]
    second = min((o["step_s"] for o in others if o["step_s"] and o["fits"]), default=None)
    return (
        each["cluster"],
        best["name"],
        f"{best['tokens_per_s']:,.0f}",
        f"{100 * each['useful_s'] / each['devices'] / best['step_s']:.0f} %",
        times(second / best["step_s"]) if second else "-",
    )


def megatron(result: Result) -> str:
    """Ours over the published throughput."""
    rows = [row for row in result["rows"] if row["own"]["tflops"]]
    ratios = [row["own"]["tflops"] / row["tflops"] for row in rows]
    return (
        f"Of Megatron-LM's {len(rows)} published layouts (Narayanan et al., SC 2021, table 1; "
        f"{rows[0]['billions']} to {rows[-1]['billions']:,} B parameters) we predict "
        f"{_range(ratios)} of the measured throughput, with nothing fitted to them: the paper's "
        "interleaved stages have a smaller bubble than the 1F1B that ours are planned with.\n"
    )


def several_ranks(result: Result) -> str:
    """Two ranks beside peers."""
    predicted = result["predicted_s"]
    rows = [
        (way, f"{1e3 * s:.0f} ms", f"{1e3 * predicted[way]:.0f} ms" if way in predicted else "")
        for way, s in result["median_s"].items()
    ]
    return markdown(("two ranks, slow network", "step", "predicted"), rows)


def buckets(result: Result) -> str:
    """Small exchanges with buckets and one by one."""
    first, last = (found["exchanges"] for found in result["ways"].values())
    ratio = times(result["ratio"])
    return f"{first} small exchanges one by one take {ratio} as long as in {last} buckets.\n"


def long_run(result: Result) -> str:
    """Steps, memory and the largest difference of losses."""
    return (
        f"{result['steps']} steps with a schedule, clipping, accumulation and a resume, in "
        f"{format_bytes(result['budget_bytes'])} of {format_bytes(result['resident_bytes'])}: "
        f"losses differ from eager's by {result['largest_difference']:.2g} at most.\n"
    )


def loss_curves(result: Result) -> str:
    """The largest relative difference of losses from eager's."""
    worst = max(v for k, v in result["largest_relative_difference"].items() if k != "eager")
    return f"50 steps, captured and with Inductor: losses within {worst:.0e} of eager's.\n"


def matrix(result: Result) -> str:
    """How many cells came out equal; the whole of it is a page of its own."""
    count = Counter(cell["status"] for cell in result["cells"])
    told = ", ".join(f"{count[s]} {s}" for s in ("equal", "rounding", "different", "refused"))
    return f"{len(result['cells'])} loops: {told}. What is not equal: [the matrix](matrix.md).\n"


def gpu_suite(result: Result) -> str:
    """Rows of the card: ours and peers, and what failed."""
    rows = [
        (
            row["name"],
            *(f"{row[key]:.3f} s" if key in row else "-" for key in ("predicted_s", "measured_s")),
            format_bytes(row["allocator_peak_bytes"]) if "allocator_peak_bytes" in row else "-",
            row.get("error") or row.get("remark", ""),
        )
        for row in [*result.get("performance", []), *result.get("peers", [])]
        if row["name"] != "capture"
    ]
    return markdown(("row", "predicted", "measured", "peak", ""), rows)

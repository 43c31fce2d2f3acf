"""Tables of the results page about the compiler: what it costs beside others, and as steps grow.

From the `result` of each benchmark's JSON to Markdown, as in `bench.results_page.tables`.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from bench.results_page.tables import markdown, times
from cotrain_compile.support.units import format_bytes, format_seconds

Result = Mapping[str, Any]


def against_torch_compile(result: Result) -> str:
    """Ours to stock `torch.compile`, everything resident."""
    rows = []
    for model, r in result.items():
        sides = ("ours", "stock")
        seconds = [statistics.median(r["processor_s"][side]) for side in sides]
        rows.append(
            (
                model,
                *map(format_seconds, seconds),
                times(seconds[0] / seconds[1]),
                *(f"{statistics.median(r['system_s'][side]):.2f} s" for side in sides),
                *(format_bytes(r["peak_bytes"][side]) for side in sides),
                times(r["peak_ratio"]),
                f"{r['segments']} ({r['kinds']} kinds)",
            )
        )
    headings = (
        "model",
        "processor time of a step, ours",
        "stock",
        "ratio",
        "of it the system, ours",
        "stock",
        "peak, ours",
        "stock",
        "ratio",
        "segments",
    )
    return markdown(headings, rows) + (
        "\nStock is a compiled model and a compiled `optimizer.step`. Its code is as fast as ours; "
        "where ours takes longer, that is the system, which hands out pages for memory that was "
        "given back: we free a gradient at its update, stock all of them as the next step begins. "
        "With `MALLOC_TRIM_THRESHOLD_` and `MALLOC_MMAP_THRESHOLD_` set to 1 TiB, glibc keeps what "
        "is freed, as the allocator of a card does.\n"
    )


def overhead(result: Result) -> str:
    """Milliseconds a step of each side, their ratio to eager's, microseconds a call or task."""
    rows = []
    for side, now in result["sides"].items():
        before = result["before"].get(side)
        of_eager = f"{now['of_eager']:.2f}"
        if before is not None and before["of_eager"] != now["of_eager"]:
            of_eager = f"{before['of_eager']:.2f} → {of_eager}"
        counts = (f"{now[key]:,}" if key in now else "-" for key in ("calls", "tasks"))
        each = f"{now['us_each']:.1f}" if "us_each" in now else "-"
        rows.append((side, f"{now['step_ms']:.1f}", of_eager, *counts, each))
    return markdown(("side", "ms a step", "of eager's", "calls", "tasks", "µs each"), rows) + (
        "\nProcessor time of all threads, with other programs on the machine, so that the ratio to "
        "eager's in the same run says more than milliseconds. Where two figures stand, the first "
        "is of the code before small updates ran in lock step. Eager PyTorch updates all "
        "parameters by one call; the captured step has an update for each, so that each can be "
        "placed.\n"
    )


def issue_cost(result: Result) -> str:
    """Microseconds of Python by plan, before this version and in it."""
    names = {
        "tasks": "tasks",
        "segments": "segments",
        "kinds": "kinds",
        "card_calls": "calls",
        "us_per_task": "µs a task",
        "us_per_segment": "µs a segment",
        "us_fixed": "µs fixed",
        "us_per_step": "µs a step",
        "planned_us": "predicted, µs",
    }
    rows = []
    for plan, now in result["after"].items():
        before = result["before"].get(plan, {})
        rows.append((plan, *(_from_to(before.get(name), now[name]) for name in names)))
    return (
        markdown(("plan", *names.values()), rows)
        + (
            "\nProcessor time of Python, on a card that computes nothing and whose calls take what "
            "they are priced at. Where two figures stand, the first is of the code before updates "
            "of a layer ran at one place and small states stayed on the device.\n"
        )
        + _starts(result["starts"])
    )


def _starts(result: Result) -> str:
    """What small tasks take on the emulated device, by themselves and in bundles."""
    names = {
        "us_alone": "µs by itself",
        "us_member": "µs in a bundle",
        "member": "share",
        "us_first": "µs once, by themselves",
        "us_first_in_bundle": "µs once, in a bundle",
    }
    rows = [(kind, *(f"{now[name]:.2f}" for name in names)) for kind, now in result.items()]
    return (
        "\n"
        + markdown(("small tasks", *names.values()), rows)
        + (
            "\nProcessor time of all threads on the emulated device, with other programs on the "
            "machine: the share says more than microseconds. Once comes mostly a thread that is "
            "woken up.\n"
        )
    )


def small_updates(result: Result) -> str:
    """Milliseconds a step and multiples of eager's, in bundles and one by one."""
    rows = [
        (
            step,
            side,
            f"{now['ms']:.1f}",
            f"{now['of_eager']:.2f}",
            f"{now['of_eager_least']:.2f} to {now['of_eager_most']:.2f}",
            *(f"{now[key]:,}" if key in now else "-" for key in ("tasks", "starts")),
        )
        for step, sides in result.items()
        if step != "lowering"
        for side, now in sides.items()
    ]
    return markdown(
        ("trained", "side", "ms a step", "of eager's", "from, to", "tasks", "starts"), rows
    ) + (
        "\nProcessor time of all threads, with other programs on the machine. Medians of rounds, "
        "each a multiple of eager's in the same round.\n"
    )


def _from_to(before: float | None, now: float) -> str:
    if before is None or round(before) == round(now):
        return f"{now:,.0f}"
    return f"{before:,.0f} → {now:,.0f}"


def small_step(result: Result) -> str:
    """Microseconds a call of both sides, and their ratio."""
    rows = [
        (model, f"{r['ours_us']:.0f}", f"{r['stock_us']:.0f}", f"{r['ratio']:.2f}")
        for model, r in result.items()
    ]
    return markdown(("MLP", "cotrain, µs a call", "torch.compile, µs a call", "ratio"), rows)


def large_step(result: Result) -> str:
    """Seconds of each stage."""
    rows = [(stage, f"{seconds:.2f} s") for stage, seconds in result["seconds"].items()]
    return markdown(("stage", "time"), rows) + (
        f"\n`{result['job'].rpartition(':')[2]}`: {result['ops']:,} ops, whose step needs "
        f"{format_bytes(result['step_peak_bytes'])}; the process takes at most "
        f"{format_bytes(result['process_peak_bytes'])}.\n"
    )


def report_page(result: Result) -> str:
    """Size of the page, and when a browser has painted it."""
    rows = [
        ("page", format_bytes(result["page_bytes"])),
        ("written in", format_seconds(result["written_s"])),
        ("first paint", format_seconds(result["first_paint_s"]["median"])),
        ("drawn", format_seconds(result["drawn_s"]["median"])),
        ("zoom", format_seconds(result["zoom_s"]["median"])),
        (
            f"{result['explain_alternatives']} alternatives explained in",
            f"{result['explain_s']:.0f} s",
        ),
    ]
    return markdown((f"{result['step']['ops']:,} ops, {result['spans']:,} spans", ""), rows)


def compile_seconds(result: Result) -> str:
    """Processor seconds of the first step of both sides, without and with a cache on disk."""
    rows = []
    for model, found in result.items():
        seconds = [found[s][c]["processor_s"] for s in ("ours", "stock") for c in ("cold", "warm")]
        compiled = found["ours"]["cold"]
        counts = f"{compiled['segments']} / {compiled['kinds']}"
        rows.append((model, *(f"{s:.0f} s" for s in seconds), counts))
    headings = ("model", "ours, cold", "warm", "stock, cold", "warm", "our segments / kinds")
    return markdown(headings, rows) + (
        "\nProcessor time of the first step, compiling included; warm, all code comes from "
        "Inductor's cache on disk. Ours compiles each kind of segment once. Where stock wins, "
        "warm, it traces the model alone, where we trace the whole step and check a plan for it.\n"
    )


def first_step(result: Result) -> str:
    """Processor seconds until a step is traced, by number of layers, and what a layer costs."""
    layers = list(result["layers"]["ours"])
    rows = []
    for side, found in result["layers"].items():
        seconds = [found[count]["all"] for count in layers]
        more = (seconds[-1] - seconds[0]) / (int(layers[-1]) - int(layers[0]))
        rows.append((side, *(f"{s:.1f} s" for s in seconds), f"{more:.2f} s"))
    headings = ("side", *(f"{count} layers" for count in layers), "a layer more")
    kept, checkpoints = result["models"]["kept"], result["models"]["checkpoints"]
    models = [
        (name, f"{kept[name]['nodes']:,}", f"{kept[name]['all']:.0f} s", f"{found['all']:.0f} s")
        for name, found in checkpoints.items()
    ]
    titles = ("traced", "ops", "seconds", "with layers in checkpoints")
    return markdown(headings, rows) + (
        "\nProcessor time, of a small GPT with clipping and AdamW. Ours is the whole step in one "
        "graph, and what each op costs; stock is the model with its loss, and the update, with "
        "graphs run in eager. Other programs ran meanwhile, so that only the sides compare.\n\n"
        f"{markdown(titles, models)}"
        "\nThe same of models of Hugging Face's at their own sizes, one sequence of 512 tokens.\n"
    )


def growth(result: Result) -> str:
    """Seconds of each stage by nodes, with the exponent of a line through the logarithms."""
    nodes = result["nodes"]
    rows = [_by_nodes(stage, found, nodes) for stage, found in result["seconds"].items()]
    rows.append(_by_nodes("memory, GiB", _in_gib(result["compiler_bytes"]), nodes))
    headings = ("stage", *(f"{count:,} nodes" for count in nodes), "exponent")
    if calls := result.get("calls"):  # results from before calls were counted have none
        exponents = {stage: f"{found['exponent']:.2f}" for stage, found in calls.items()}
        rows = [(*row, exponents.get(row[0], "-")) for row in rows]
        headings += ("of calls",)
    step = [
        f"{kind} {found['us_an_op'][0]:.0f} to {found['us_an_op'][-1]:.0f} µs"
        for kind, found in result["seconds_a_step"].items()
    ]
    return markdown(headings, rows) + (
        f"\nSeconds, and what the process takes. An exponent of 1 is linear. Run on tensors of "
        f"almost no size, an op costs, from the shallowest to the deepest: {', '.join(step)}.\n"
    )


def _by_nodes(stage: str, found: Result, nodes: Sequence[int]) -> tuple[str, ...]:
    values = dict(zip(found["sizes"], found["values"], strict=True))
    cells = (f"{values[count]:.3g}" if count in values else "-" for count in nodes)
    return stage, *cells, f"{found['exponent']:.2f}"


def _in_gib(found: Result) -> Result:
    return {**found, "values": [value / 2**30 for value in found["values"]]}


def host_update_parts(result: Result) -> str:
    """Each way to run an update on the host, and what the planner takes it for."""
    rows = [
        (record["dtype"], name, f"{1e3 * seconds:.1f} ms", times(record["predicted"][name]))
        for record in result["records"]
        for name, seconds in record["seconds"].items()
    ]
    return markdown(("dtype", "ops", "AdamW of 8.4M parameters", "predicted / measured"), rows)


def fake_cuda_matrix(result: Result) -> str:
    """Cells by precision and policy, and those that failed."""
    policies = list(dict.fromkeys(row["policy"] for row in result["rows"]))
    precisions = list(dict.fromkeys(row["precision"] for row in result["rows"]))
    rows = [(p, *(_cells(result, p, policy) for policy in policies)) for p in precisions]
    failed = "".join(f"- failed: {row['name']}\n" for row in result["failed"])
    cells, product = result["cells"], result["cells_of_the_product"]
    which = f"All {cells}" if cells == product else f"{cells} of the {product}"
    chosen = "" if cells == product else ", chosen so that each pair of two of them is there"
    told = (
        f"{which} cells of optimizer, precision, attention, micro-batches and policy{chosen}: "
        "traced, planned, checked, rewritten and cut into segments on a card that is not there. "
        "Refused is an optimizer that makes its state in its first step, under `GradScaler`.\n"
    )
    return f"{markdown(('passed / refused / failed', *policies), rows)}\n{told}{failed}"


def _cells(result: Result, precision: str, policy: str) -> str:
    found = [
        row["status"]
        for row in result["rows"]
        if (row["precision"], row["policy"]) == (precision, policy)
    ]
    return " / ".join(str(found.count(status)) for status in ("passed", "refused", "failed"))

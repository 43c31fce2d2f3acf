"""What the results page says of the compiler: what it costs beside others, and as steps grow.

From the `result` of each benchmark's JSON to a few sentences, as in `bench.results_page.tables`.
"""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Mapping
from typing import Any

from bench.results_page.tables import markdown, times
from cotrain_compile.support.units import format_bytes, format_seconds

Result = Mapping[str, Any]


def against_torch_compile(result: Result) -> str:
    """Ours to stock `torch.compile`, everything resident."""
    rows = []
    for model, r in result.items():
        seconds = [statistics.median(r["processor_s"][side]) for side in ("ours", "stock")]
        ratio, peak = times(seconds[0] / seconds[1]), times(r["peak_ratio"])
        rows.append((model, *map(format_seconds, seconds), ratio, peak))
    headings = ("model", "processor time of a step", "stock", "ratio", "ratio of peaks")
    return markdown(headings, rows) + (
        "\nStock is a compiled model and `optimizer.step`. *Memory kept*: "
        "`MALLOC_TRIM_THRESHOLD_` and `MALLOC_MMAP_THRESHOLD_` are 1 TiB, so that glibc keeps what "
        "is freed, as a card's allocator does. We free a gradient at its update, stock all of them "
        "together.\n"
    )


def compile_seconds(result: Result) -> str:
    """Processor seconds of the first step of both sides, without and with a cache on disk."""
    rows = []
    for model, found in result.items():
        seconds = [found[s][c]["processor_s"] for s in ("ours", "stock") for c in ("cold", "warm")]
        rows.append((model, *(f"{s:.0f} s" for s in seconds)))
    headings = ("first step, processor time", "ours, cold", "warm", "stock, cold", "warm")
    return markdown(headings, rows)


def five_jobs(result: Result) -> str:
    """What a new user's jobs took at first, and take: a person's steps, and processor seconds."""
    rows, steps = [], [0, 0]
    for job, found in result.items():
        now, then = found["now"], found["then"]
        seconds = now["compiled"] - now["eager"] if "eager" in now else sum(now.values())
        told = [f"{s:.0f} s" if s else "not noted" for s in (then["s"], seconds)]
        rows.append((job, str(then["steps"]), str(found["steps"]), *told))
        steps = [steps[0] + then["steps"], steps[1] + found["steps"]]
    rows.append(("all", *map(str, steps), "", ""))
    return markdown(("job", "steps, at first", "now", "processor time, at first", "now"), rows) + (
        "\nSteps are attempts, arguments, files and commands until it runs. Processor time is what "
        "8 updates take beyond eager's with nothing on disk, the compile included; of the plan all "
        "of it.\n"
    )


_INDUCTOR = "stock with Inductor"


def first_step(result: Result) -> str:
    """What a layer more costs, the first call of a small step, and until models are traced."""
    layers = result["layers"]
    few, more = list(layers["ours"])

    def each(side: str) -> str:
        apart = layers[side][more]["all"] - layers[side][few]["all"]
        return f"{apart / (int(more) - int(few)):.2f} s"

    called = [layers[f"{side}, called"][few]["all"] for side in ("ours", "eager", _INDUCTOR)]
    ours_s, eager_s, stock_s = called
    traced = result["models"]["kept"]
    models = "; ".join(f"{name} {found['all']:.0f} s" for name, found in traced.items())
    return (
        f"A layer more costs {each('ours')} of processor time, {each('stock')} with stock "
        f"`torch.compile`. The first call of a step of {few} layers, with nothing on disk, takes "
        f"{ours_s:.1f} s; in eager {eager_s:.1f} s, with stock `torch.compile` {stock_s:.1f} s. "
        f"Until a step is traced: {models}.\n"
    )


def overhead(result: Result) -> str:
    """Of eager's time, on tensors of almost no size."""
    told = "; ".join(
        f"{side} {found['of_eager']:.2f}"
        for side, found in result["sides"].items()
        if "lowering" in side
    )
    return f"Processor time as a multiple of eager's, on tiny tensors: {told}.\n"


def issue_cost(result: Result) -> str:
    """Python of a step on a card, and of a task without the calls to CUDA, by plan."""
    told = "; ".join(
        f"{plan} {now['us_per_step'] / 1e3:.1f} ms for {now['tasks']} tasks"
        + (f", {now['python_us_per_task']:.1f} µs each" if now["tasks"] else "")
        for plan, now in result["after"].items()
    )
    return (
        f"Python of a step, on a card that computes nothing: {told}, without the calls to CUDA.\n"
    )


def small_updates(result: Result) -> str:
    """Multiples of eager's, in bundles and one by one."""
    told = "; ".join(
        f"{step} {times(sides['in bundles']['of_eager'])} in bundles, "
        f"{times(sides['one by one']['of_eager'])} one by one"
        for step, sides in result.items()
        if step != "lowering"
    )
    return f"Processor time beside eager's, with every update on the host: {told}.\n"


def small_step(result: Result) -> str:
    """Our time over stock's."""
    ratios = ", ".join(f"{model} {times(r['ratio'])}" for model, r in result.items())
    return f"A call beside stock `torch.compile`'s: {ratios}.\n"


def large_step(result: Result) -> str:
    """Seconds to capture and analyse."""
    return (
        f"{result['ops']:,} ops are captured, extracted and analysed in "
        f"{result['capture_extract_analysis_s']:.0f} s; the process takes at most "
        f"{format_bytes(result['process_peak_bytes'])}.\n"
    )


def report_page(result: Result) -> str:
    """Size of the page, and when a browser has painted it."""
    return (
        f"The page of {result['step']['ops']:,} ops has {format_bytes(result['page_bytes'])}; "
        f"Chromium first paints it after {format_seconds(result['first_paint_s']['median'])} and "
        f"has drawn it after {format_seconds(result['drawn_s']['median'])}.\n"
    )


def growth(result: Result) -> str:
    """Exponents of stages in the number of nodes."""
    found = {stage: each["exponent"] for stage, each in result["seconds"].items()}
    worst = max(found, key=lambda stage: found[stage])
    nodes = result["nodes"]
    return (
        f"From {nodes[0]:,} to {nodes[-1]:,} nodes each of {len(found)} stages grows with an "
        f"exponent of at most {found[worst]:.2f} ({worst}; 1 is linear), memory with "
        f"{result['compiler_bytes']['exponent']:.2f}.\n"
    )


def host_update_parts(result: Result) -> str:
    """How much faster parts that stay in the cache are."""
    told = "; ".join(
        f"{record['dtype']} {times(record['times_as_fast']['in parts'])}"
        for record in result["records"]
    )
    return f"An update without a fused loop, in parts that stay in the cache: {told} as fast.\n"


def fake_cuda_matrix(result: Result) -> str:
    """Cells that went through on a card that is not there."""
    count = Counter(row["status"] for row in result["rows"])
    failed = "".join(f"- failed: {row['name']}\n" for row in result["failed"])
    return (
        f"Of {result['cells']:,} cells of optimizer, precision, attention, micro-batches and "
        f"policy {count['passed']:,} are traced, planned, checked and cut into segments on a card "
        f"that is not there; {count['refused']} are refused (state made in the first step under "
        f"`GradScaler`), {count['failed']} failed.\n{failed}"
    )

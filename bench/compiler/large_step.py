"""What does it take to capture and analyse a 7B step? Seconds and memory, without a GPU.

python -m bench.compiler.large_step -o bench/results/large_step.json
"""

from __future__ import annotations

import argparse
import resource
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from bench.report import write_report
from cotrain_compile import presets
from cotrain_compile.analysis.costs import roofline
from cotrain_compile.analysis.liveness import liveness
from cotrain_compile.analysis.reuse import critical_path_s, reuse_distances
from cotrain_compile.entry.tracing import trace_graph
from cotrain_compile.extract.extract import extract
from cotrain_compile.jobs import load_job
from cotrain_compile.machine import MEMORIES
from cotrain_compile.placement.policies import rule
from cotrain_compile.placement.problem import formulate
from cotrain_compile.placement.schedule.schedule import schedule

JOB = "docs/examples/llama.py:llama_7b"


def main() -> None:
    """Time every stage once; the largest resident size covers the whole process."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("-o", "--output", type=Path, required=True)
    parser.add_argument("--job", default=JOB)
    arguments = parser.parse_args()
    seconds: dict[str, float] = {}

    def timed(stage: str, work: Callable[[], Any]) -> Any:
        started = time.perf_counter()
        result = work()
        seconds[stage] = round(time.perf_counter() - started, 3)
        print(f"{stage:14}{seconds[stage]:8.2f} s", flush=True)
        return result

    step = timed("capture", lambda: trace_graph(load_job(arguments.job)))
    dataflow = timed("extract", lambda: extract(step))
    machine = presets.find("h200")
    times = timed("roofline", lambda: roofline(dataflow, machine)).device_s
    alive = timed("liveness", lambda: liveness(dataflow))
    timed("reuse", lambda: reuse_distances(dataflow, times))
    timed("critical path", lambda: critical_path_s(dataflow, times))
    total_s = sum(seconds.values())
    budgets = dict.fromkeys(MEMORIES, 1 << 40)
    problem = formulate(dataflow, machine, budgets)
    timed("schedule", lambda: schedule(problem, rule("zero-offload")(dataflow)))
    kib = 1 if sys.platform == "darwin" else 1024
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * kib
    result = {
        "job": arguments.job,
        "ops": len(dataflow.ops),
        "update_groups": len(dataflow.updates),
        "seconds": seconds,
        "capture_extract_analysis_s": round(total_s, 3),
        "process_peak_bytes": peak,
        "step_peak_bytes": alive.peak_bytes,
    }
    write_report(arguments.output, (__doc__ or "").splitlines()[0], result)
    print(f"capture, extract and analysis {total_s:.1f} s, process peak {peak / 2**30:.2f} GiB")


if __name__ == "__main__":
    main()

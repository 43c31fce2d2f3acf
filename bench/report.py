"""Reports: one JSON per run of a benchmark, with what is needed to compare it with another."""

from __future__ import annotations

import json
import os
import platform
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

import cotrain_compile


def write_report(path: Path, question: str, result: dict[str, Any]) -> None:
    """Write `result` with the command, the hardware and the versions it was measured with."""
    document = {
        "question": question,
        "command": " ".join([Path(sys.executable).name, *sys.orig_argv[1:]]),
        "date": datetime.now(UTC).strftime("%Y-%m-%d"),
        "hardware": {
            "processor": _processor(),
            "cores": len(os.sched_getaffinity(0)),
            "memory_bytes": os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"),
            "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "emulated",
        },
        "versions": {
            "python": platform.python_version(),
            "torch": torch.__version__,
            "cotrain-compile": cotrain_compile.__version__,
        },
        "result": result,
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(document, indent=1) + "\n")


def runs_before(path: Path) -> list[dict[str, str]]:
    """Commands and dates of the runs by which the report at `path` was made, which is added to."""
    document = json.loads(path.read_text())
    runs = [*document["result"].get("others", ()), document]
    told = [{name: run[name] for name in ("command", "date")} for run in runs]
    return list({run["command"]: run for run in told}.values())


def _processor() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.processor()

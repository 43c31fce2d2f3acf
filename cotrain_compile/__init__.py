"""cotrain-compile: training steps that do not fit on the GPU.

    step = torch.compile(step, backend="cotrain", options={"memory_budget": "20GiB"})

Importing this package loads no torch; `burst`, `cpu_helpers`, `inspect`, `pipeline`, `report`,
`shard`, `synchronize` and `trace` do on first use.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from cotrain_compile import errors
from cotrain_compile.options import Options

if TYPE_CHECKING:
    from cotrain_compile.compiled import inspect, report, synchronize
    from cotrain_compile.distribute.burst import burst
    from cotrain_compile.distribute.cpu_helpers import cpu_helpers
    from cotrain_compile.distribute.shard import shard
    from cotrain_compile.pipelining.pipeline import pipeline
    from cotrain_compile.tracing import trace

__all__ = [
    "Options",
    "burst",
    "cpu_helpers",
    "errors",
    "inspect",
    "pipeline",
    "report",
    "shard",
    "synchronize",
    "trace",
]
__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    if name in ("inspect", "report", "synchronize"):
        from cotrain_compile import compiled

        return getattr(compiled, name)
    if name == "trace":
        from cotrain_compile import tracing

        return tracing.trace
    if name == "shard":
        from cotrain_compile.distribute import shard

        return shard.shard
    if name == "burst":
        from cotrain_compile.distribute import burst

        return burst.burst
    if name == "cpu_helpers":
        from cotrain_compile.distribute import cpu_helpers

        return cpu_helpers.cpu_helpers
    if name == "pipeline":
        from cotrain_compile.pipelining import pipeline

        return pipeline.pipeline
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

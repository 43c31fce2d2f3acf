"""cotrain-compile: training steps that do not fit on the GPU.

    step = torch.compile(step, backend="cotrain", options={"memory_budget": "20GiB"})

or, with options that an editor completes,

    step = cotrain_compile.compile(step, memory_budget="20GiB")

Importing this package loads nothing; all but `Options` and `errors` load torch on first use.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from cotrain_compile import errors
    from cotrain_compile.distribute.burst import burst
    from cotrain_compile.distribute.clip import clip_grad_norm
    from cotrain_compile.distribute.cpu_helpers import cpu_helpers
    from cotrain_compile.distribute.shard import shard
    from cotrain_compile.entry.compiled import (
        inspect,
        offload,
        reload,
        report,
        scalars,
        synchronize,
    )
    from cotrain_compile.entry.tracing import trace
    from cotrain_compile.entry.typed_compile import compile
    from cotrain_compile.options import Options
    from cotrain_compile.pipelining.pipeline import pipeline
    from cotrain_compile.scaling.scale import scale

__all__ = [
    "Options",
    "burst",
    "clip_grad_norm",
    "compile",
    "cpu_helpers",
    "errors",
    "inspect",
    "offload",
    "pipeline",
    "reload",
    "report",
    "scalars",
    "scale",
    "shard",
    "synchronize",
    "trace",
]
__version__ = "0.2.0"


# Where each name is.
_HOMES = {
    "Options": "options",
    "burst": "distribute.burst",
    "clip_grad_norm": "distribute.clip",
    "compile": "entry.typed_compile",
    "cpu_helpers": "distribute.cpu_helpers",
    "inspect": "entry.compiled",
    "offload": "entry.compiled",
    "pipeline": "pipelining.pipeline",
    "reload": "entry.compiled",
    "report": "entry.compiled",
    "scalars": "entry.compiled",
    "scale": "scaling.scale",
    "shard": "distribute.shard",
    "synchronize": "entry.compiled",
    "trace": "entry.tracing",
}


def __getattr__(name: str) -> Any:
    if name == "errors":
        return import_module(f"{__name__}.{name}")
    if name in _HOMES:
        return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    """All names that are there, also those that were not used yet."""
    return sorted({*globals(), *__all__})

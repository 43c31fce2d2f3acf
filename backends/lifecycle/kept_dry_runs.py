"""Kept dry runs: what a first step took of each tier, found by the next process that runs it.

Where the bytes of a device are counted op by op, the same code takes the same of it in every
process. So the peaks of a dry run that kept to its budgets go on disk, by a digest of all that
they follow from: the placed graph, the code of its segments by Inductor's key, how the inputs lie
in memory, options and machine, torch, the processor and its threads. What the kernels of other
libraries take is in no digest: a step with such ops has a dry run in every process. So is one on a
card, where it matters how its memory is cut up and who else has some of it.
"""

from __future__ import annotations

import hashlib
import json
import platform
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import fx
from torch._ops import HigherOrderOperator, OpOverload

from cotrain_compile.backends.inductor.compile_graph import key_of
from cotrain_compile.backends.inductor.lower import LoweredStep
from cotrain_compile.backends.lifecycle.compiled_step import CompiledStep
from cotrain_compile.files import parsed, write_whole
from cotrain_compile.machine import MEMORIES, Tier
from cotrain_compile.runtime.ops import TASKS
from cotrain_compile.support.disk_cache import folder_of, keep_at_most, package_digest

MOST_BYTES = 1 << 20  # of 50 bytes a step
_OF_TORCH = frozenset({"aten", "prims", "cotrain"})


@dataclass(frozen=True)
class KeptDryRun:
    """The file with the peaks of a step, if it had a dry run."""

    path: Path

    def peak_bytes(self) -> Mapping[Tier, int] | None:
        """The most bytes on each tier; None where there is no such file, or it is damaged."""
        try:
            found = parsed(self.path.read_text())
            peaks = {tier: found[tier.value] for tier in MEMORIES}
        except (OSError, ValueError, KeyError, TypeError):
            return None
        if any(type(nbytes) is not int or nbytes < 0 for nbytes in peaks.values()):
            return None
        with suppress(OSError):
            self.path.touch()  # what is used last stays
        return peaks

    def keep(self, peak_bytes: Mapping[Tier, int]) -> None:
        """Write the peaks of a dry run; nothing where no file can be written."""
        with suppress(OSError):
            self.path.parent.mkdir(parents=True, exist_ok=True)
            write_whole(self.path, json.dumps({tier.value: peak_bytes[tier] for tier in MEMORIES}))
            keep_at_most(self.path.parent, MOST_BYTES)

    def forget(self) -> None:
        """Delete the file."""
        with suppress(OSError):
            self.path.unlink(missing_ok=True)


def kept_dry_run(
    compiled: CompiledStep, inputs: Sequence[Any], settings: object
) -> KeptDryRun | None:
    """Where the dry run of a step on these `inputs` is kept; None where it may take another peak.

    `settings` has a repr that says with what else the step was compiled.
    """
    folder = folder_of("dry runs")
    if folder is None or not compiled.is_metered or not _is_of_torch(compiled.graph.module):
        return None
    code = _code_of(compiled.lowered)
    if code is None:
        return None
    graphs = [str(part.graph) for part in _graphs(compiled.graph.module)]
    settings = repr((settings, compiled.problem.machine))
    parts = [package_digest(), settings, *_environment(), *_layout(inputs), *graphs, *code]
    digest = hashlib.sha256()
    for part in parts:
        digest.update(part.encode() + b"\0")
    return KeptDryRun(folder / digest.hexdigest()[:32])


def _graphs(module: fx.GraphModule) -> list[fx.GraphModule]:
    """The placed graph and what runs on the host."""
    return [part for part in module.modules() if isinstance(part, fx.GraphModule)]


def _is_of_torch(module: fx.GraphModule) -> bool:
    """Whether torch or this package has written every kernel."""
    targets = {n.target for part in _graphs(module) for n in part.graph.nodes} - TASKS
    return not any(
        isinstance(target, HigherOrderOperator)
        or (isinstance(target, OpOverload) and target.namespace not in _OF_TORCH)
        for target in targets
    )


def _code_of(lowered: LoweredStep | None) -> list[str] | None:
    """The graph around the segments and the key of each one's code; None where one has no key."""
    if lowered is None:
        return []
    keys = [key_of(code) for code in lowered.code.values()]
    found = [key for key in keys if key is not None]
    graph = str(lowered.segmented.step.module.graph)
    return [graph, *lowered.code, *found] if len(found) == len(keys) else None


def _layout(inputs: Sequence[Any]) -> list[str]:
    """How the inputs lie in memory, and which of them share some."""
    first: dict[int, int] = {}
    found = []
    for place, value in enumerate(inputs):
        if not isinstance(value, torch.Tensor):
            found.append(type(value).__name__)
            continue
        storage = value.untyped_storage()
        shared = first.setdefault(storage.data_ptr(), place)
        shape = (value.dtype, tuple(value.shape), value.stride(), value.storage_offset())
        found.append(f"{shared} {storage.nbytes()} {shape}")
    return found


def _environment() -> tuple[str, ...]:
    """By what torch's kernels choose how much they take inside."""
    return (
        torch.__config__.show(),
        platform.platform(),
        torch.backends.cpu.get_cpu_capability(),
        str(torch.get_num_threads()),
        str((torch.backends.mkldnn.enabled, torch.are_deterministic_algorithms_enabled())),
    )

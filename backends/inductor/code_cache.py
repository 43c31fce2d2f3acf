"""Code cache: what Inductor made of a graph in another process, found before the graph is prepared.

Inductor keeps its code on disk under a key of the graph that it is given at last, which takes
several times as long to make of a segment as the code takes to load: a trace with decompositions,
and a search for patterns. So the key of a segment as it is, by Inductor's own rules, leads here to
the key of what became of it. The code itself is in Inductor's folder and nowhere else.

Private torch API used: `torch._inductor.codecache.FxGraphCache`, its `prepare_key` and
`load_with_key`, `CompiledFxGraph` and `CompiledFxGraphConstants`. Tried on torch 2.13.0; where one
of them is missing, or takes other arguments, graphs are prepared.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from torch import fx
from torch._inductor import config
from torch._inductor.codecache import FxGraphCache
from torch._inductor.output_code import CompiledFxGraph, CompiledFxGraphConstants
from torch._inductor.utils import BoxedBool

from cotrain_compile.files import write_whole
from cotrain_compile.support.disk_cache import keep_at_most, package_digest, private_folder

MOST_BYTES = 4 << 20  # of 50 bytes a segment
# As `compile_fx_inner` completes them for a graph of its own.
SETTINGS: dict[str, Any] = {
    "static_input_idxs": (),
    "is_backward": False,
    "is_inference": False,
    "graph_id": None,
    "cpp_wrapper": False,
    "fx_wrapper": False,
    "boxed_forward_device_index": None,
    "layout_opt": None,
    "extern_node_serializer": None,
}


def cached_code(
    module: fx.GraphModule, inputs: Sequence[Any], made_for: object, make: Callable[[], Any]
) -> Any:
    """What `make` gives for `module` at its `inputs`, which are fake: loaded if it was kept.

    `made_for` is what else the code depends on, and prints as. `make` is called under the settings
    of Inductor, and within the tracing context, that hold for `make`.
    """
    folder = private_folder("segments")  # it says which code runs
    if folder is None or not config.fx_graph_cache or config.force_disable_caches:
        return make()
    settings = {**SETTINGS, "cudagraphs": BoxedBool(False)}
    try:
        found, _ = FxGraphCache.prepare_key(module, inputs, settings, (), False)  # type: ignore[arg-type]
    except (AttributeError, TypeError):  # another torch
        return make()
    if found is None:  # what Inductor keeps no code of
        return make()
    digest = hashlib.sha256(f"{found[0]} {made_for} {package_digest()}".encode()).hexdigest()[:32]
    path = folder / digest
    code = _load(path, inputs, settings)
    if code is None:
        code = make()
        # What depends on guards has no single key: none of ours does, whose sizes are numbers.
        if isinstance(code, CompiledFxGraph) and code._fx_graph_cache_key and not code.guards_expr:
            with suppress(OSError):
                write_whole(path, code._fx_graph_cache_key)
                keep_at_most(folder, MOST_BYTES)
    return code


def _load(path: Path, inputs: Sequence[Any], settings: Any) -> Any:
    """The code whose key `path` has; None where it has none, or Inductor no longer has the code."""
    try:
        key = path.read_text()
        path.touch()  # what is used last stays
    except (OSError, UnicodeDecodeError):
        return None
    if not key.isalnum():  # it becomes the name of a folder
        return None
    constants = CompiledFxGraphConstants()
    code, _ = FxGraphCache.load_with_key(key, [], inputs, True, None, False, constants)
    if code is not None:
        code.post_compile(inputs, constants, settings)
        code._fx_graph_cache_key = key
    return code


def key_of(code: Any) -> str | None:
    """Inductor's key of what it compiled, the same in every process; None where it gave none."""
    return getattr(code, "_fx_graph_cache_key", None)

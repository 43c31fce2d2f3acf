"""Inductor: one functional graph, and fake tensors for its inputs, become compiled code.

Private torch API used: `torch._inductor.compile_fx.compile_fx_inner` (compiles a graph as it is and
returns a function that takes a list and empties it, so that an input is freed at its last use),
`select_decomp_table`, `joint_graph_passes`, the fake tensors' modes, `TracingContext` and
`fx_passes.post_grad._chain_random_ops_for_ordering`. Tried on torch 2.11.0, 2.13.0 and 2.15.0.

Code cache: what Inductor made of a graph in another process, found before the graph is prepared.

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
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import fx
from torch._guards import TracingContext, tracing
from torch._inductor import config
from torch._inductor.codecache import FxGraphCache
from torch._inductor.output_code import CompiledFxGraph, CompiledFxGraphConstants
from torch._inductor.utils import BoxedBool
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.torch_version import TorchVersion

from cotrain_compile.backends.inductor.partition import settings_for
from cotrain_compile.capture.nodes.kernel_strides import strides_of_kernels
from cotrain_compile.files import write_whole
from cotrain_compile.graph import returns_argument_memory
from cotrain_compile.graph.random_ops import is_random
from cotrain_compile.support.disk_cache import keep_at_most, package_digest, private_folder

aten = torch.ops.aten

Code = Callable[[list[Any]], Sequence[Any]]
Strides = Sequence[tuple[int, ...]]

# Records the calls of a kernel with their addresses, and these change: see decision 18.
CUDA_GRAPHS = "triton.cudagraphs"
# Random numbers are eager's unless the user asks for Inductor's own, which are faster. No CUDA
# graphs, though they may be on for what else the process compiles.
DEFAULTS: Mapping[str, Any] = {"fallback_random": True, CUDA_GRAPHS: False}
# On a card a kernel rounds where the op in the trace does, and joins no product to a sum: else the
# last bits of a result would depend on which ops a plan lets Triton put in one kernel, and two
# plans of one step would train apart. Code for the processor never does either.
ON_A_CARD: dict[str, Any] = {"emulate_precision_casts": True}
if TorchVersion(torch.__version__) < "2.13":
    # Of a sum that keeps its dimensions, fused with one along the others, the code of torch 2.11
    # returns what has lost them, where it is a result of the graph; that of 2.13 does not.
    ON_A_CARD["triton.mix_order_reduction"] = False


def compile_graph(
    module: fx.GraphModule,
    inputs: Sequence[Any],
    options: Mapping[str, Any],
    strides: Strides | None = None,
) -> Code:
    """Code for `module` at the sizes of `inputs`, which are fake tensors of one mode.

    The code takes its inputs in a list, which it empties, and returns what `module` returns, with
    these `strides`; without them, as its decomposition lays it out. `options` are settings of
    `torch._inductor.config`. Raises what Inductor does.
    """
    on_card = any(isinstance(v, torch.Tensor) and v.device.type != "cpu" for v in inputs)
    with (
        config.patch({**DEFAULTS, **(ON_A_CARD if on_card else {}), **options}),
        torch.no_grad(),
        tracing(TracingContext(fake_mode_of(inputs))),
    ):
        code: Code = cached_code(
            module, inputs, strides, lambda: _prepare_and_compile(module, inputs, strides)
        )
    return code


@strides_of_kernels()  # what Inductor does not compile itself, it calls in ATen
def _prepare_and_compile(
    module: fx.GraphModule, inputs: Sequence[Any], strides: Strides | None
) -> Any:
    # Most of a second to import: who compiles nothing, or finds the code, does without.
    from torch._inductor.compile_fx import compile_fx_inner
    from torch._inductor.decomposition import select_decomp_table
    from torch._inductor.fx_passes.joint_graph import joint_graph_passes

    mode = fake_mode_of(inputs)
    with mode:
        decomposed = make_fx(module, decomposition_table=select_decomp_table())(*inputs)
    scale_before_adding(decomposed.graph)
    if strides is not None:
        with mode:
            _lay_out_results(decomposed.graph, strides)
    decomposed.recompile()  # Inductor's cache looks at the source, not at the graph
    joint_graph_passes(decomposed)
    output = next(iter(decomposed.graph.find_nodes(op="output")))
    # What a segment returns is read by others, which were compiled for these strides.
    output.meta["user_visible_output_idxs"] = list(range(len(output.args[0])))
    with config.patch(settings_for(decomposed.graph)):
        return compile_fx_inner(decomposed, list(inputs))


def _lay_out_results(graph: fx.Graph, strides: Strides) -> None:
    """Copy each result that does not lie in memory by its `strides` into memory that does.

    A decomposition may lay out a result in another way than the op that stands in the trace.
    """
    output = next(iter(graph.find_nodes(op="output")))
    with graph.inserting_before(output):
        results = [_laid_out(graph, *pair) for pair in zip(output.args[0], strides, strict=True)]
    output.args = (tuple(results),)


def _laid_out(graph: fx.Graph, result: fx.Node, strides: tuple[int, ...]) -> fx.Node:
    value = result.meta["val"]
    if all(n < 2 or a == b for n, a, b in zip(value.shape, value.stride(), strides, strict=True)):
        return result
    kwargs = {"dtype": value.dtype, "device": value.device}
    memory = graph.call_function(
        aten.empty_strided.default, (list(value.shape), list(strides)), kwargs
    )
    memory.meta["val"] = torch.empty_strided(value.shape, strides, **kwargs)
    laid_out = graph.call_function(aten.copy.default, (memory, result))
    laid_out.meta["val"] = memory.meta["val"]
    return laid_out


def scale_before_adding(graph: fx.Graph) -> None:
    """Write `add(mm, c, alpha=k)` as `add(mm, mul(c, k))`.

    Inductor makes one product with a sum of the former, and forgets the factor (2.11 to 2.15).
    """
    for node in list(graph.find_nodes(op="call_function", target=aten.add.Tensor)):
        first, second = node.args
        if node.kwargs.get("alpha", 1) != 1 and (_is_product(first) or _is_product(second)):
            with graph.inserting_before(node):
                scaled = graph.call_function(aten.mul.Tensor, (second, node.kwargs["alpha"]))
            scaled.meta["val"] = second.meta["val"] * node.kwargs["alpha"]
            node.args, node.kwargs = (first, scaled), {}


def _is_product(value: Any) -> bool:
    """Whether `value` is a product of matrices, or a view of one, which may be left out."""
    while isinstance(value, fx.Node) and returns_argument_memory(value):
        value = value.args[0]
    return isinstance(value, fx.Node) and value.target is aten.mm.default


@cache
def _ties_random_ops() -> bool:
    """Whether torch ties the random ops of a graph together in their order.

    A result that nobody uses is tied to nothing, though.
    """
    from torch._inductor.fx_passes import post_grad  # takes long to import

    return hasattr(post_grad, "_chain_random_ops_for_ordering")


def may_draw_out_of_order(node: fx.Node) -> bool:
    """Whether code for a graph with `node` and other random ops may draw in another order."""
    return is_random(node) and not (node.users and _ties_random_ops())


def draws_other_numbers(node: fx.Node) -> bool:
    """Whether code for `node` draws other numbers than its kernel, from the same generator.

    Inductor writes `bernoulli(p)` as `rand(float32) < p`: so does the kernel in float32 alone
    (2.11 to 2.15).
    """
    return node.target is aten.bernoulli.default and node.meta["val"].dtype is not torch.float32


def fake_mode_of(inputs: Sequence[Any]) -> Any:
    """The mode that `inputs` were made in; a new one where there are none."""
    modes = [value.fake_mode for value in inputs if hasattr(value, "fake_mode")]
    return modes[0] if modes else FakeTensorMode()


def unknown_settings(options: Mapping[str, Any]) -> list[str]:
    """Those of `options` that are no settings of Inductor."""
    known = config.get_config_copy()
    return [name for name in options if name not in known]


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

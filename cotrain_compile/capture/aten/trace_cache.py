"""Trace cache: the ATen graph of a step that an earlier process prepared, found by Dynamo's graph.

Lowering and preparing a step takes two fifths of the time that a process needs to its first step
when all code is on disk already. torch keeps what AOTAutograd makes of a graph, with the wrappers
around it and a key that says when it holds, for compilers that can write down what they made. Here
that is the ATen graph: what compiles it runs in every process.

torch's key is of Dynamo's graph, its inputs' shapes, torch's settings, version and machine. What it
leaves out and the ATen graph depends on is added: notes on nodes, which inputs share memory, which
attention kernels are allowed and in which order, this package's source. What may depend on more is
lowered anew: steps of several ranks, offline traces, inputs that are subclasses, dynamic sizes,
constants that are tensors, subgraphs other than checkpoints.

Private torch API used: `AOTAutogradCache`, by settings, `BypassAOTAutogradCache`, `OutputCode`,
`torch.fx._graph_pickler`, `torch._C._get_sdp_priority_order`. Tried on torch 2.13.0; with another
version every process lowers.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from contextvars import ContextVar
from dataclasses import dataclass
from pickle import PicklingError
from typing import Any

import torch
from torch import distributed, fx
from torch._functorch import config as functorch_config
from torch._functorch._aot_autograd.autograd_cache import BypassAOTAutogradCache
from torch._guards import TracingContext
from torch._higher_order_ops.wrap import tag_activation_checkpoint
from torch._inductor import config as inductor_config
from torch._inductor.output_code import OutputCode
from torch._ops import HigherOrderOperator
from torch.compiler import config as compiler_config
from torch.fx._graph_pickler import GraphPickler
from torch.fx._graph_pickler import Options as PicklerOptions

from cotrain_compile.capture.aten.kept_values import Values, give_values, values_of
from cotrain_compile.capture.offline.card_attention import DEPRIORITIZED
from cotrain_compile.capture.offline.only_trace import is_only_traced
from cotrain_compile.dataflow import Checkpoints
from cotrain_compile.graph import graph_module
from cotrain_compile.support.disk_cache import folder_of, package_digest

Compile = Callable[[fx.GraphModule, Checkpoints], Callable[..., Any]]
AotCompile = Callable[[fx.GraphModule, Sequence[Any]], Callable[..., Any]]

TRIED = ("2.13.",)
# What AOTAutograd hands on from Dynamo's nodes, and torch's key does not have.
_NOTES = ("custom", "recompute", "ac_graph_id", "nn_module_stack", "stack_trace")
# What is read of the nodes of an ATen graph after it was made, beside their values.
_KEPT = frozenset({*_NOTES, "desc", "autograd_backward"})
_KNOWN_PARTS = frozenset({tag_activation_checkpoint})
_FORMAT = PicklerOptions(ops_filter=None, node_metadata_key_filter=_KEPT.__contains__)
# The graph itself is kept in place of a key to Inductor's code, whatever the compiler is called.
_SETTINGS = ("enable_autograd_cache", "bundled_autograd_cache", "force_autograd_cache")


@dataclass(frozen=True)
class _Kept:
    """A graph as bytes, without the values of its nodes, and these beside it."""

    graph: bytes
    checkpoints: Checkpoints
    values: Values


class _LoweredGraph(OutputCode):
    """An ATen graph as it can be kept, and what runs it in this process."""

    def __init__(self, kept: _Kept | None, run: Callable[..., Any]) -> None:
        super().__init__()
        self._kept, self.run = kept, run
        self._boxed_call = True

    def __call__(self, inputs: Sequence[Any]) -> Any:
        return self.run(inputs)

    def set_triton_bundle(self, triton_bundle: Any) -> None:
        """Kernels are kept elsewhere."""

    def prepare_for_serialization(self) -> None:
        """Leave what runs the graph behind."""
        if self._kept is None:
            raise BypassAOTAutogradCache("this ATen graph is not kept")
        del self.run

    def post_compile(self, example_inputs: Any, constants: Any, graph_kwargs: Any) -> None:
        """Give word that the graph was found. It is compiled later: torch hides errors here."""
        _found.get().append(self)

    def found(self) -> tuple[fx.GraphModule, Checkpoints]:
        """The graph, with values of the trace that goes on, and what is in a checkpoint."""
        fake_mode = TracingContext.get().fake_mode
        assert self._kept is not None and fake_mode is not None
        return read_again(self._kept, fake_mode), self._kept.checkpoints


_found: ContextVar[list[_LoweredGraph]] = ContextVar("cotrain_found_graphs")


def lower_once(
    module: fx.GraphModule,
    inputs: Sequence[Any],
    lower: Callable[[AotCompile], Callable[..., Any]],
    prepare: Callable[[fx.GraphModule], Checkpoints],
    compile_aten: Compile,
    settings: tuple[object, ...],
) -> Callable[..., Any]:
    """What runs `module`: `lower` has AOTAutograd make its ATen graph, which `compile_aten` gets.

    A graph that was found on disk has the nodes, names and values that `lower` and `prepare` give,
    which hang on nothing else than `module`, its `inputs` and `settings`.
    """

    def compile_made(graph: fx.GraphModule, _: Sequence[Any]) -> Callable[..., Any]:
        return compile_aten(graph, prepare(graph))

    if not may_be_kept(module, inputs):
        return lower(compile_made)
    guards = _guards()

    def compile_and_keep(graph: fx.GraphModule, _: Sequence[Any]) -> OutputCode:
        checkpoints = prepare(graph)
        # Where the graph holds for some numbers only, they are for AOTAutograd to say each time.
        kept = written(graph, checkpoints) if _guards() == guards else None
        with (
            functorch_config.patch(bundled_autograd_cache=False),
            _tagged(tag),
        ):
            return _LoweredGraph(kept, compile_aten(graph, checkpoints))

    found: list[_LoweredGraph] = []
    token = _found.set(found)
    tag = compiler_config.cache_key_tag
    own = f"{tag} {package_digest()} {digest_of(module, inputs, settings)}"
    try:
        with (
            functorch_config.patch(dict.fromkeys(_SETTINGS, True)),
            _tagged(own),
        ):
            run = lower(compile_and_keep)
    finally:
        _found.reset(token)
    for lowered in found:
        lowered.run = compile_aten(*lowered.found())
    return run


def _tagged(tag: str) -> AbstractContextManager[None]:
    """Within it, torch's keys of what it keeps on disk have `tag`."""
    patched: AbstractContextManager[None] = compiler_config.patch(cache_key_tag=tag)  # type: ignore[attr-defined]
    return patched


def may_be_kept(module: fx.GraphModule, inputs: Sequence[Any]) -> bool:
    """Whether the ATen graph of `module` depends on nothing but what its key has."""
    return (
        torch.__version__.startswith(TRIED)
        and folder_of("traces") is not None
        and functorch_config.enable_autograd_cache
        and inductor_config.fx_graph_cache
        and not compiler_config.force_disable_caches
        and not is_only_traced()
        and not (distributed.is_available() and distributed.is_initialized())
        and all(type(value) in (torch.Tensor, torch.nn.Parameter) for value in inputs)
        and not any(isinstance(v, torch.SymInt) for value in inputs for v in value.shape)
        and not any(map(_has_unknown_parts, _graphs(module)))
    )


def _has_unknown_parts(module: fx.GraphModule) -> bool:
    """Whether a graph calls what is no op, or holds tensors of its own."""
    return any(
        (isinstance(node.target, HigherOrderOperator) and node.target not in _KNOWN_PARTS)
        or (node.op == "get_attr" and not isinstance(_part(module, node), fx.GraphModule))
        for node in module.graph.nodes
    )


def _part(module: fx.GraphModule, node: fx.Node) -> object:
    return getattr(module, str(node.target), None)


def _graphs(module: fx.GraphModule) -> list[fx.GraphModule]:
    return [part for part in module.modules() if isinstance(part, fx.GraphModule)]


def _guards() -> int:
    """How many conditions on sizes and numbers the trace has made so far."""
    fake_mode = TracingContext.get().fake_mode
    shape_env = fake_mode.shape_env if fake_mode is not None else None
    return len(shape_env.guards) if shape_env is not None else 0


def digest_of(module: fx.GraphModule, inputs: Sequence[Any], settings: tuple[object, ...]) -> str:
    """Of what the ATen graph depends on beside torch's own key."""
    digest = hashlib.sha256()
    for part in _graphs(module):
        for node in part.graph.nodes:
            notes = {key: node.meta[key] for key in _NOTES if key in node.meta}
            if "nn_module_stack" in notes:
                notes["nn_module_stack"] = _named(notes["nn_module_stack"])
            digest.update(f"{node.name} {notes}\n".encode())
    first: dict[int, int] = {}
    for place, value in enumerate(inputs):
        storage = value.untyped_storage()
        shared = first.setdefault(storage._cdata, place)
        digest.update(f"{shared} {value.storage_offset()} {storage.nbytes()}\n".encode())
    digest.update(repr((settings, _settings())).encode())
    return digest.hexdigest()


def _settings() -> tuple[object, ...]:
    """By which a trace chooses the ops of what torch computes in more than one way."""
    cuda = torch.backends.cuda
    return (
        torch.get_default_dtype(),
        cuda.flash_sdp_enabled(),
        cuda.mem_efficient_sdp_enabled(),
        cuda.math_sdp_enabled(),
        cuda.cudnn_sdp_enabled(),
        torch._C._get_sdp_priority_order(),
        os.environ.get(DEPRIORITIZED),
        torch.are_deterministic_algorithms_enabled(),
        torch.backends.cudnn.enabled,
        torch.backends.cudnn.version(),
        torch.backends.mkldnn.enabled,
    )


def written(graph: fx.GraphModule, checkpoints: Checkpoints) -> _Kept | None:
    """`graph` as it can be kept; None where it holds tensors of its own, or graphs."""
    if any(node.op in ("get_attr", "call_module") for node in graph.graph.nodes):
        return None
    values = values_of(graph.graph)
    if values is None:
        return None
    for node in graph.graph.nodes:
        if stack := node.meta.get("nn_module_stack"):
            node.meta["nn_module_stack"] = _named(stack)
    try:
        return _Kept(GraphPickler.dumps(graph, _FORMAT), checkpoints, values)
    except (AttributeError, TypeError, AssertionError, NotImplementedError, PicklingError):
        return None  # a note on a node, say, that nothing can write: this step is lowered each time


def read_again(kept: _Kept, fake_mode: Any) -> fx.GraphModule:
    """The graph that was written, with values of `fake_mode`."""
    read: Any = GraphPickler.loads(kept.graph, fake_mode)
    give_values(read.graph.nodes, kept.values, fake_mode)
    return graph_module(read, read.graph)  # what was read cannot be called


def _named(stack: Mapping[str, tuple[str, object]]) -> dict[str, tuple[str, str]]:
    """A stack of modules with names for their classes, and places for the ids of the modules."""
    calls = enumerate(stack.values())
    return {str(place): (path, _class_name(kind)) for place, (path, kind) in calls}


def _class_name(kind: object) -> str:
    return f"{kind.__module__}.{kind.__qualname__}" if isinstance(kind, type) else str(kind)

"""From Dynamo's graph of the step to one functional ATen graph, handed to a compiler function.

Private torch API used: `torch._dynamo.backends.common.aot_autograd`, the `example_value` meta of
Dynamo's nodes, `SideEffects.store_attr_mutations`, `InstructionTranslator.current_tx`,
`VariableTracker.visit`,
`_disable_current_modes`, `torch._functorch.config`. Tried on
torch 2.11.0, 2.13.0 and 2.15.0. What `TracingContext` knows of outputs
(`ViewAndMutationMeta`, and descriptors): on 2.13.0.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import fx, nn
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.side_effects import SideEffects
from torch._dynamo.symbolic_convert import InstructionTranslator
from torch._dynamo.variables.base import VariableTracker
from torch._dynamo.variables.tensor import TensorVariable
from torch._functorch import config as functorch_config
from torch._functorch._aot_autograd.descriptors import PlainAOTOutput
from torch._functorch._aot_autograd.schemas import OutputType
from torch._guards import TracingContext
from torch.utils._python_dispatch import _disable_current_modes

from cotrain_compile.capture.aten.scalars import (
    floats_stay_inputs,
    foreach_decompositions,
    scalar_decompositions,
)
from cotrain_compile.capture.aten.trace_cache import AotCompile, lower_once
from cotrain_compile.capture.counts import lowering_counted
from cotrain_compile.capture.dynamo.scaling import scaling_decompositions
from cotrain_compile.capture.layers.lower import lower_few_layers
from cotrain_compile.dataflow import Checkpoints
from cotrain_compile.errors import CaptureError
from cotrain_compile.graph import StepInput

AtenCompiler = Callable[[fx.GraphModule, Checkpoints], Callable[..., Any]]


def to_aten(
    module: fx.GraphModule,
    example_inputs: Sequence[Any],
    inputs: Sequence[StepInput],
    prepare_aten: Callable[[fx.GraphModule], Checkpoints],
    compile_aten: AtenCompiler,
    settings: tuple[object, ...] = (),
) -> Callable[..., Any]:
    """Lower Dynamo's graph to ATen, prepare and compile it, and return what runs the step.

    `inputs` describe its placeholders.
    `prepare_aten` changes the graph in place, by nothing but the graph and `settings`, and says
    what is in a checkpoint. `compile_aten` returns a function that takes the list of inputs.
    Parameters and states are written in place by `copy_` nodes of the graph.
    """

    def prepared(graph: fx.GraphModule) -> Checkpoints:
        with _disable_current_modes():
            return prepare_aten(graph)

    def run_whole(graph: fx.GraphModule, checkpoints: Checkpoints) -> Callable[..., Any]:
        # AOT compiles under a fake mode; what compiles a step may compute with real tensors.
        with _disable_current_modes():
            run = compile_aten(graph, checkpoints)
        run._boxed_call = True  # type: ignore[attr-defined]
        return run

    def lowered(
        part: fx.GraphModule,
        values: Sequence[Any],
        first: Callable[[fx.GraphModule], None],
        also: tuple[object, ...],
    ) -> Callable[..., Any]:
        def prepare(graph: fx.GraphModule) -> Checkpoints:
            first(graph)
            _return_no_inputs(graph)
            return prepared(graph)

        with lowering_counted(len(part.graph.nodes)):
            return lower_once(
                part,
                values,
                partial(_by_aot, part, values),
                prepare,
                run_whole,
                (*settings, *also),
            )

    # Torch's own pass for checkpoints refuses random ops; `remat` keeps their results.
    no_pass_for_checkpoints = functorch_config.patch(remat_using_tags_for_fwd_loss_bwd_graph=False)
    with no_pass_for_checkpoints, floats_stay_inputs():
        return lower_few_layers(module, example_inputs, inputs, lowered)


def _by_aot(
    module: fx.GraphModule, example_inputs: Sequence[Any], compile_graph: AotCompile
) -> Callable[..., Any]:
    """What runs `module`, whose functional ATen graph `compile_graph` gets."""
    compiler = aot_autograd(
        fw_compiler=_refuse_a_backward,
        bw_compiler=_refuse_a_backward,
        inference_compiler=compile_graph,
        decompositions={
            **foreach_decompositions(),
            **scalar_decompositions(),
            **scaling_decompositions(),
        },
        # Otherwise every parameter and state is returned as a fresh copy.
        keep_inference_input_mutations=True,
    )
    run: Callable[..., Any] = compiler(module, example_inputs)
    return run


def _refuse_a_backward(graph: fx.GraphModule, _: Sequence[Any]) -> Callable[..., Any]:
    """In place of compiling a graph that something outside of it would differentiate."""
    if any("embedding_renorm" in str(node.target) for node in graph.graph.nodes):
        raise CaptureError(
            "an embedding with max_norm changes its weight in the forward; leave max_norm out, "
            "and do it before the model is called, under torch.no_grad(), with rows = "
            "tokens.flatten(): weight.index_copy_(0, rows, torch.renorm(weight[rows], 2, 0, "
            "max_norm))"
        )
    raise CaptureError(
        "a parameter is written from values that require grad, or the step returns tensors "
        "that do, so its backward is not in the graph; write parameters under "
        "torch.no_grad(), call loss.backward() in the step and return detached values"
    )


def _return_no_inputs(module: fx.GraphModule) -> None:
    """Return None where the step returns an input: AOT's caller gets the user's tensor itself.

    So a state that its optimizer assigns to itself, as in `state["exp_avg"] =
    state["exp_avg"].type_as(p)`, can be written by an update that runs anywhere.
    """
    metadata = TracingContext.get().fw_metadata
    (output,) = module.graph.find_nodes(op="output")
    returned: Any = output.args[0]
    described: Sequence[Any] = output.meta.get("desc") or ()
    if metadata is None or len(described) != len(returned):
        return
    # What AOT puts together of parts, as a DTensor, is no plain output and has no index.
    inputs = [
        isinstance(description, PlainAOTOutput)
        and metadata.output_info[description.idx].output_type is OutputType.is_input
        for description in described
    ]
    if any(inputs):
        output.args = ([None if i else n for i, n in zip(inputs, returned, strict=True)],)
        module.recompile()


def detach_outputs(module: fx.GraphModule) -> None:
    """Detach returned tensors whose graph `backward()` has consumed; eager frees it as well.

    So are tensors that the step has made leaves of: nothing that it returns requires a gradient.
    """
    output = next(node for node in module.graph.nodes if node.op == "output")
    results = []
    for node in output.args[0]:
        value = node.meta.get("example_value") if isinstance(node, fx.Node) else None
        computed = isinstance(node, fx.Node) and node.op != "placeholder"
        if isinstance(value, torch.Tensor) and computed and value.requires_grad:
            with module.graph.inserting_before(output):
                detached = module.graph.call_method("detach", (node,))
            detached.meta["example_value"] = value.detach()
            node = detached
        results.append(node)
    output.args = (tuple(results),)
    module.recompile()


def gradient_stores(
    module: fx.GraphModule, example_inputs: Sequence[Any]
) -> list[tuple[torch.Tensor, fx.Node]]:
    """Which node of the graph the trace stores in `.grad` of which leaf tensor."""
    real = _real_inputs(module, example_inputs)
    effects = InstructionTranslator.current_tx().output.side_effects
    stores: list[tuple[torch.Tensor, fx.Node]] = []
    for variable, attributes in effects.store_attr_mutations.items():
        owner_proxy = getattr(variable, "proxy", None)
        stored_proxy = getattr(attributes.get("grad"), "proxy", None)
        if owner_proxy is not None and stored_proxy is not None:
            owner = real.get(owner_proxy.node)
            if isinstance(owner, torch.Tensor):
                stores.append((owner, stored_proxy.node))
    return stores


def also_given_away(
    stores: Sequence[tuple[torch.Tensor, fx.Node]],
) -> set[int]:
    """The ids of the leaf tensors whose new `.grad` the step also returns, or leaves elsewhere.

    Elsewhere is what outlives the step: a list, a dictionary or an attribute that it has changed.
    """
    tx = InstructionTranslator.current_tx()
    effects = tx.output.side_effects
    attributes = [
        value
        for owner, stored in effects.store_attr_mutations.items()
        for name, value in stored.items()
        if not (name == "grad" and _is_tensor(owner))
    ]
    changed = [v for v in effects.id_to_variable.values() if _is_changed_container(effects, v)]
    nodes: set[fx.Node] = set()

    def note(variable: VariableTracker) -> None:
        node = getattr(vars(variable).get("proxy"), "node", None)
        if node is not None:
            nodes.add(node)

    VariableTracker.visit(note, [list(tx.stack), attributes, changed])
    return {id(leaf) for leaf, node in stores if node in nodes}


def _is_changed_container(effects: SideEffects, variable: VariableTracker) -> bool:
    """Whether the step has changed what a variable holds, other than as its attributes."""
    return (
        not _is_tensor(variable) and not variable.is_immutable() and effects.is_modified(variable)
    )


def _is_tensor(variable: VariableTracker) -> bool:
    # `isinstance` would make an input of a value that the trace has not looked at.
    return issubclass(type(variable), TensorVariable)


def drop_outputs(module: fx.GraphModule, dropped: Sequence[fx.Node]) -> None:
    """Return None in place of `dropped`. For a gradient: `p.grad` is None after the step.

    Dynamo returns a gradient that is alive when the step ends, to store it in `p.grad`. When the
    next step starts by clearing it, keeping it would only cost memory.
    """
    output = next(node for node in module.graph.nodes if node.op == "output")
    output.args = (tuple(None if node in dropped else node for node in output.args[0]),)
    module.recompile()


def params_with_gradient(
    module: fx.GraphModule, example_inputs: Sequence[Any]
) -> list[torch.Tensor]:
    """The real leaf tensors for which some backward of the step computes a gradient."""
    real = _real_inputs(module, example_inputs)
    found: dict[int, torch.Tensor] = {}
    for call in module.graph.nodes:
        if call.op == "call_function" and call.target is torch.autograd.grad:
            leaves = _differentiated(call)
            for item in call.users:
                leaf = leaves[item.args[1]]
                if isinstance(item.meta.get("example_value"), torch.Tensor) and leaf in real:
                    found[id(real[leaf])] = real[leaf]
    return list(found.values())


def _differentiated(call: fx.Node) -> Sequence[Any]:
    """What a call of `torch.autograd.grad` differentiates by: one tensor or several."""
    inputs: Any = call.args[1] if len(call.args) > 1 else call.kwargs["inputs"]
    return [inputs] if isinstance(inputs, fx.Node) else inputs


def traced_modules() -> list[tuple[str, nn.Module]]:
    """Every module the trace has met, with the source text by which it was reached."""
    effects = InstructionTranslator.current_tx().output.side_effects
    return [
        (_source_text(variable), module)
        for variable in effects.id_to_variable.values()
        if isinstance(module := vars(variable).get("value"), nn.Module)
    ]


def refuse_unseen_hooks(params: Sequence[torch.Tensor]) -> None:
    """Gradient hooks run inside eager's autograd; the captured backward would skip them."""
    for param in params:
        if param._backward_hooks or getattr(param, "_post_accumulate_grad_hooks", None):
            raise CaptureError(
                "a parameter has a gradient hook (register_hook or "
                "register_post_accumulate_grad_hook), which a captured step would skip; remove it "
                "and do its work in the step, after backward(): on p.grad, or optimizer.step()"
            )


def refuse_sparse_gradients(module: fx.GraphModule) -> None:
    """The bytes of a sparse tensor depend on the data, so that no plan can count on them."""
    for node in module.graph.nodes:
        value = node.meta.get("example_value")
        if isinstance(value, torch.Tensor) and value.is_nested:
            raise CaptureError(
                "a tensor of the step is nested (torch.nested), and its size depends on the data; "
                "pad it outside the step, torch.nested.to_padded_tensor(t, 0.0), and mask the rest"
            )
        if isinstance(value, torch.Tensor) and value.layout is not torch.strided:
            raise CaptureError(
                "a tensor of the step is sparse, such as the gradient of nn.Embedding(sparse=True),"
                " and its size depends on the data; make the layer with sparse=False"
            )


def _real_inputs(module: fx.GraphModule, example_inputs: Sequence[Any]) -> dict[fx.Node, Any]:
    placeholders = [node for node in module.graph.nodes if node.op == "placeholder"]
    return dict(zip(placeholders, example_inputs, strict=True))


def _source_text(variable: Any) -> str:
    name = getattr(getattr(variable, "source", None), "name", "")
    return str(name() if callable(name) else name)

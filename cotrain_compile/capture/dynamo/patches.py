"""What Dynamo does otherwise while it traces a step for this backend.

Stock Dynamo never sees a whole training step (`docs/decisions/0001-whole-step-capture.md`).

Private torch API used: `config.trace_autograd_ops`, `variables.builder.OptimizerVariable`,
`OutputGraph._validate_outputs_safe_for_autograd_nodes` and
`._check_requires_grad_intermediate_outputs`, look-up of attributes,
`SymNodeVariable.nb_true_divide_impl` (2.13 alone),
`InliningInstructionTranslator.inline_call`, `guards.is_from_optimizer_source` and
`guards.match_on_id_for_tensor`, `OutputGraph.remove_tensorify_specialized_graphargs`,
`_inductor.config.fallback_random`, `UserDefinedObjectVariable.is_supported_random`,
`RandomVariable.is_supported_random_obj` (2.13 alone), `RandomClassVariable.call_function`,
`config.use_numpy_random_stream` and `.side_effect_replay_policy`,
`builder.tensor_always_has_static_shape`,
`builder.is_int_specialization_case` (where a torch has it).
Reason: there is no public way to keep `backward()` and `optimizer.step()` in one graph, to have it
refuse the numbers that it draws otherwise than eager, nor to have it make an input of a whole
number that a script counts. Tried on torch 2.11.0, 2.13.0 and 2.15.0, what is about random numbers
and whole numbers on 2.13.0 alone.
"""

from __future__ import annotations

import functools
import logging
import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from itertools import chain
from typing import Any, NoReturn
from unittest import mock

from torch import nn
from torch._dynamo import config, guards
from torch._dynamo.exc import raise_observed_exception, unimplemented
from torch._dynamo.output_graph import OutputGraph
from torch._dynamo.symbolic_convert import InliningInstructionTranslator
from torch._dynamo.variables import builder
from torch._dynamo.variables.misc import RandomClassVariable, RandomVariable
from torch._dynamo.variables.tensor import SymNodeVariable, TensorVariable
from torch._dynamo.variables.user_defined import UserDefinedObjectVariable
from torch._inductor import config as inductor_config

from cotrain_compile.capture.dynamo.alike_accumulations import accumulated_once_a_kind
from cotrain_compile.capture.dynamo.alike_updates import grouped_at_once, traced_once_a_kind
from cotrain_compile.capture.dynamo.ambient import ambient_guarded
from cotrain_compile.capture.dynamo.attributes import LOOK_UP
from cotrain_compile.capture.dynamo.causal_masks import known_in_trace, not_exporting
from cotrain_compile.capture.dynamo.checkpoint_effects import checkpoint_effects_traced
from cotrain_compile.capture.dynamo.data_parallel import forward_traced, means_traced
from cotrain_compile.capture.dynamo.gradient_hooks import backward_traced
from cotrain_compile.capture.dynamo.leaves import leaves_traced
from cotrain_compile.capture.dynamo.log_calls import Said, log_calls_traced, said_in_trace
from cotrain_compile.capture.dynamo.missing_rules import (
    class_names_traced,
    compile_traced,
    deques_bounded,
    in_place_traced,
    inference_mode_traced,
    methods_by_name,
    repeated_arguments_traced,
    rules_added,
)
from cotrain_compile.capture.dynamo.numbers_of_ops import numbers_traced
from cotrain_compile.capture.dynamo.optimizers import build_optimizer_variable, update_itself
from cotrain_compile.capture.dynamo.own_errors import errors_noted
from cotrain_compile.capture.dynamo.reads_of_settings import settings_read_at_once
from cotrain_compile.capture.dynamo.recompiles import reasons_noted
from cotrain_compile.capture.dynamo.rewritten import rewritten, rewritten_traced
from cotrain_compile.capture.dynamo.scaling import scalers_traced, traced_instead
from cotrain_compile.capture.dynamo.session import Session
from cotrain_compile.capture.dynamo.settings import (
    settings_traced,
    sizes_fixed,
    whole_numbers_traced,
)
from cotrain_compile.capture.dynamo.sharded_modules import fsdp_traced, gathering_traced
from cotrain_compile.capture.dynamo.unread_code import unread_code_unwritten
from cotrain_compile.capture.dynamo.walks_of_parameters import parameters_walked
from cotrain_compile.capture.dynamo.wrappers import without_hook
from cotrain_compile.capture.nodes.fake_calls import fake_calls_at_once
from cotrain_compile.capture.nodes.kernel_strides import strides_of_kernels

# The second is not in every torch: tried with 2.13.0.
_CHECKS_OF_OUTPUTS = {
    "_validate_outputs_safe_for_autograd_nodes",
    "_check_requires_grad_intermediate_outputs",
}


Patch = tuple[Any, str, Any]

# By which Dynamo traces what `random` and generators of Python draw.
_DRAWS_OF_PYTHON = (
    (UserDefinedObjectVariable, "is_supported_random"),
    (RandomVariable, "is_supported_random_obj"),
)


@contextmanager
def whole_step_tracing(session: Session) -> Iterator[None]:
    """Within it, Dynamo traces a whole training step into one graph.

    Dynamo holds its compile lock meanwhile, so no other thread traces; nothing that eager code uses
    is changed.
    """
    said = Said()
    with ExitStack() as stack:
        for context in _settings():
            stack.enter_context(context)
        # One after the other: a replacement calls what stood there, which may be another one.
        for owner, name, instead in chain(
            _general(session, said),
            _of_this_torch(),
            rules_added(),
            reasons_noted(session),
            errors_noted(session),
            log_calls_traced(said),
            deques_bounded(),
            ambient_guarded(),
            inference_mode_traced(),
            numbers_traced(),
            class_names_traced(),
            repeated_arguments_traced(),
            checkpoint_effects_traced(session),
            settings_read_at_once(),
            fake_calls_at_once(),
            unread_code_unwritten(),
            parameters_walked(),
        ):
            stack.enter_context(mock.patch.object(owner, name, instead))
        stack.enter_context(methods_by_name())
        stack.enter_context(compile_traced())
        stack.enter_context(scalers_traced())
        stack.enter_context(not_exporting())
        stack.enter_context(rewritten_traced())
        stack.enter_context(accumulated_once_a_kind())
        stack.enter_context(backward_traced(session))
        stack.enter_context(means_traced(session))
        stack.enter_context(gathering_traced(session))
        stack.enter_context(settings_traced(session.settings))
        stack.enter_context(leaves_traced(session.leaves_made, session.copied_data))
        stack.enter_context(in_place_traced())
        stack.enter_context(grouped_at_once())
        stack.enter_context(strides_of_kernels())
        yield


def _settings() -> Iterator[AbstractContextManager[Any]]:
    """Torch's own switches."""
    yield config.patch(
        trace_autograd_ops=True,
        capture_scalar_outputs=True,
        allow_rnn=True,
        # A hook that a module gets later is followed, or refused, as one that it had before.
        skip_nnmodule_hook_guards=False,
        # A trace would draw NumPy's numbers from torch's generator.
        use_numpy_random_stream=True,
        # One factory makes the steps of many models: they share a code object, and Dynamo
        # counts their compiles together.
        recompile_limit=max(config.recompile_limit, 64),
        **_no_words_on_writes(),
    )
    # Numbers that nobody reads are drawn all the same: what comes after hangs on them. torch
    # drops such ops while it traces, unless random numbers are to be eager's.
    yield inductor_config.patch(fallback_random=True)
    yield _meta_failures_unlogged()


def _no_words_on_writes() -> dict[str, Any]:
    """What keeps Dynamo from describing each write of the step where nobody logs it."""
    heard = _LOG_OF_WRITES.isEnabledFor(logging.DEBUG) or os.environ.get("TORCH_TRACE")
    if heard or getattr(config, _TOLD_OF_WRITES, None) != "info":
        return {}
    return {_TOLD_OF_WRITES: "silent"}


_LOG_OF_WRITES = logging.getLogger("torch._dynamo.side_effects.__side_effects")
_TOLD_OF_WRITES = "side_effect_replay_policy"


@contextmanager
def _meta_failures_unlogged() -> Iterator[None]:
    """Without torch's own log of an op that does not fit its shapes; the error says the same."""
    log = logging.getLogger("torch._subclasses.fake_tensor")
    log.addFilter(_is_no_meta_failure)
    try:
        yield
    finally:
        log.removeFilter(_is_no_meta_failure)


def _is_no_meta_failure(record: logging.LogRecord) -> bool:
    return config.verbose or not str(record.msg).startswith("failed while attempting to run meta")


def _general(session: Session, said: Said) -> Iterator[Patch]:
    """What is replaced in every torch: owner, name and what stands there instead."""
    yield builder, "OptimizerVariable", functools.partial(build_optimizer_variable, session)
    inline = functools.partial(_inline_for_us, session, said)
    yield InliningInstructionTranslator, "inline_call", inline
    # Stock Dynamo does not check that an optimizer's parameters are still the model's: after
    # `load_state_dict(assign=True)` a compiled step would go on with the old ones.
    yield guards, "is_from_optimizer_source", lambda _: False
    yield guards, "match_on_id_for_tensor", _must_be_the_same_tensor
    yield builder, _IS_STATIC, sizes_fixed(getattr(builder, _IS_STATIC))
    remove = OutputGraph.remove_tensorify_specialized_graphargs
    yield OutputGraph, "remove_tensorify_specialized_graphargs", _remove_inputs_only(remove)


def _of_this_torch() -> Iterator[Patch]:
    """What is replaced where a torch has it."""
    # Python's numbers come out differently from those of eager.
    for kind, name in _DRAWS_OF_PYTHON:
        if hasattr(kind, name):
            yield kind, name, lambda _: False
    yield RandomClassVariable, "call_function", _refuse_generator
    # They break the graph when a returned tensor went through backward(), or depends on one
    # that the step has made a leaf of; `to_aten` detaches such outputs instead.
    for name in _CHECKS_OF_OUTPUTS & vars(OutputGraph).keys():
        yield OutputGraph, name, lambda *_: None
    yield TensorVariable, LOOK_UP, _attribute_as_traced(vars(TensorVariable)[LOOK_UP])
    if hasattr(builder, _IS_CONSTANT):
        yield builder, _IS_CONSTANT, whole_numbers_traced(getattr(builder, _IS_CONSTANT))
    if hasattr(SymNodeVariable, _DIVIDE):
        yield SymNodeVariable, _DIVIDE, _divide_as_python(getattr(SymNodeVariable, _DIVIDE))


def _refuse_generator(self: Any, tx: Any, args: Any, kwargs: Any) -> NoReturn:
    """In place of making a `random.Random`: what it draws is a tensor in float64 to Dynamo."""
    explanation = "Dynamo does not know how to trace what an object of class `Random` draws"
    unimplemented(gb_type="random.Random()", context="", explanation=explanation, hints=[])


_IS_CONSTANT = "is_int_specialization_case"
_IS_STATIC = "tensor_always_has_static_shape"
_DIVIDE = "nb_true_divide_impl"


def _divide_as_python(original: Callable[..., Any]) -> Callable[..., Any]:
    """`original` but for a number that is 0: dividing by it raises what the step may catch.

    Dynamo computes `0 / 0` of inputs in its fake tensors, where the ZeroDivisionError is its end.
    """

    @functools.wraps(original)
    def divide(self: Any, tx: Any, other: Any, reverse: bool = False) -> Any:
        divisor = getattr(self if reverse else other, "sym_num", None)
        node = getattr(divisor, "node", None)
        if node is not None and node.has_hint() and divisor == 0:
            raise_observed_exception(ZeroDivisionError, tx)
        return original(self, tx, other, reverse)

    return divide


def _remove_inputs_only(original: Callable[..., None]) -> Callable[[OutputGraph], None]:
    """`original`, which removes inputs that stand for Python floats, without its side effect.

    It takes whatever shows a float64 scalar and has no reader for such an input: an in-place op on
    a parameter or state of no dimensions too, so that it would never be updated.
    """

    def remove(self: OutputGraph) -> None:
        nodes = [n for n in self.graph.nodes if n.op != "placeholder" and "example_value" in n.meta]
        hidden = [(node, node.meta.pop("example_value")) for node in nodes]
        try:
            original(self)
        finally:
            for node, value in hidden:
                node.meta["example_value"] = value

    return remove


def _attribute_as_traced(original: Callable[..., Any]) -> Callable[..., Any]:
    """`original` but for a `.grad` that the trace has set: that is what it was set to.

    Dynamo then labels the value as read from the real `p.grad`. On None, one constant for all
    traces in the process, the label stays: a later store of None anywhere loads that gradient.
    """

    @functools.wraps(original)
    def look_up(self: TensorVariable, tx: Any, name: str) -> Any:
        effects = tx.output.side_effects
        if name == "grad" and effects.has_pending_mutation_of_attr(self, name):
            return effects.load_attr(self, name)
        return original(self, tx, name)

    return look_up


_match_on_id_for_tensor = guards.match_on_id_for_tensor


def _must_be_the_same_tensor(guard: Any) -> bool:
    """Whether the next call has to bring this very tensor, as a parameter is.

    Dynamo asks it also of the gradient of a parameter that it reached as a key of the optimizer's
    state; but that is a new tensor in every step.
    """
    is_gradient = getattr(guard.originating_source, "member", None) == "grad"
    return _match_on_id_for_tensor(guard) and not is_gradient


_inline_call = InliningInstructionTranslator.inline_call


def _inline_for_us(
    session: Session,
    said: Said,
    parent: Any,
    func: Any,
    args: list[Any],
    *rest: Any,
    **options: Any,
) -> Any:
    """Trace a call whose result is not known already; of a scaler or an update, another way.

    Notes a `module.zero_grad()` before any backward, as an optimizer's is noted.
    """
    session.graph = parent.output.graph
    if getattr(func, "fn", None) is nn.Module.zero_grad and len(args) == 1 and rest == ({},):
        module = vars(args[0]).get("value")
        if isinstance(module, nn.Module):
            after_backward = bool(parent.output.autograd_grad_consumed_grad_fns)
            session.note_cleared(module.parameters(), after_backward)
    if rest and (known := known_in_trace(parent, func, args, rest[0])) is not None:
        return known
    called = getattr(func, "fn", None)
    if called and rest and (done := said_in_trace(said, parent, called, args, rest[0])) is not None:
        return done
    func = rewritten(update_itself(traced_instead(session, func, args)), args)
    func = without_hook(func, args)
    func, args = forward_traced(session, parent, func, args)
    func, args = fsdp_traced(session, parent, func, args)

    def trace(given: list[Any]) -> Any:
        return _inline_call(parent, func, given, *rest, **options)

    updated = getattr(func, "fn", None)
    if rest and (once := traced_once_a_kind(parent, updated, args, rest[0], trace)) is not None:
        return once
    return trace(args)

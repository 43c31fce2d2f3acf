"""Layer rules: how losses, norms, convolutions, attention and products of groups treat rows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import fx

from cotrain_compile.extract.regions.calls import (
    COUNTED,
    OWN,
    SUM,
    PartCall,
    PartResult,
    Result,
    Rule,
    shape_of,
)
from cotrain_compile.extract.regions.rows import Rows

# Losses.


def _nll_loss(call: PartCall) -> PartResult | None:
    """The log-likelihoods of the targets; what counts of them is counted beforehand."""
    source, target = call.argument("self"), call.argument("target")
    if call.argument("weight") is not None or call.rows.get(source) != Rows(0, 0):
        return None
    needs = {} if target in call.rows else {target: Rows(0, 0)}
    if len(shape_of(source)) not in (2, 4) or call.rows.get(target, Rows(0, 0)) != Rows(0, 0):
        return None
    none = call.argument("reduction") == 0
    return PartResult((Rows(0, 0) if none else SUM, COUNTED), needs)


def _nll_loss_backward(call: PartCall) -> PartResult | None:
    names = ("grad_output", "self", "target", "total_weight")
    grad, source, target, counted = (call.argument(name) for name in names)
    if (
        call.argument("weight") is not None
        or len(shape_of(source)) not in (2, 4)
        or counted in call.rows
    ):
        return None
    own = [source, target, *([grad] if call.argument("reduction") == 0 else [])]
    if any(call.rows.get(node, Rows(0, 0)) != Rows(0, 0) for node in own):
        return None
    if grad in call.rows and grad not in own:
        return None
    return PartResult(Rows(0, 0), {node: Rows(0, 0) for node in own if node not in call.rows})


# Norms.


def _layer_norm(call: PartCall) -> PartResult | None:
    node, normal = call.argument("input"), call.argument("normalized_shape")
    rows = call.rows.get(node)
    if rows is None or rows.last >= len(shape_of(node)) - len(normal):
        return None
    return PartResult((rows, rows, rows))


def _layer_norm_backward(call: PartCall) -> PartResult | None:
    names = ("grad_out", "input", "mean", "rstd")
    tensors = [call.argument(name) for name in names]
    found = {call.rows[node] for node in tensors if node in call.rows}
    if len(found) != 1:
        return None
    (rows,) = found
    if rows.last >= len(shape_of(tensors[1])) - len(call.argument("normalized_shape")):
        return None
    return PartResult((rows, SUM, SUM), {node: rows for node in tensors if node not in call.rows})


# Of samples: what these do to one looks at no other.

SAMPLES = Rows(0, 0)


def _samples(*names: str, made: int = 1) -> Rule:
    """`made` results of samples, from samples of the arguments `names`."""

    def rule(call: PartCall) -> PartResult | None:
        tensors = [call.argument(name) for name in names]
        if not _are(call, tensors, SAMPLES):
            return None
        needs = {node: SAMPLES for node in tensors if node not in call.rows}
        return PartResult((SAMPLES,) * made if made > 1 else SAMPLES, needs)

    return rule


def _samples_backward(*names: str) -> Rule:
    """The gradient of samples, and shares of those of a weight and a bias."""

    def rule(call: PartCall) -> PartResult | None:
        found = _samples(*names)(call)
        if found is None:
            return None
        there = (value is not None for value in call.node.meta["val"])
        made: tuple[Result, ...] = (SAMPLES, SUM, SUM)
        known = (each if is_there else None for each, is_there in zip(made, there, strict=True))
        return PartResult(tuple(known), found.needs)

    return rule


def _are(call: PartCall, tensors: Sequence[fx.Node], rows: Rows) -> bool:
    """Whether of all arguments these alone come in parts, by such rows."""
    return set(call.rows) <= set(tensors) and all(
        call.rows.get(node, rows) == rows and shape_of(node)[rows.first] % call.length == 0
        for node in tensors
    )


# Attention: what a kernel does to one sequence looks at no other.


def _attention(call: PartCall) -> PartResult | None:
    """What is attended to, and what the backward is told of each row; the rest a part has alone."""
    count = len(call.node.meta["val"])
    return _sequences(call, "query", "key", "value", made=(SAMPLES, SAMPLES, *[OWN] * (count - 2)))


def _attention_backward(call: PartCall) -> PartResult | None:
    if any(value is not None for value in call.node.meta["val"][3:]):
        return None  # the gradient of a mask, which all sequences may share
    grad = next(name for name in call.arguments if name.startswith("grad_out"))
    names = grad, "query", "key", "value", "out", "logsumexp"
    none = [None] * (len(call.node.meta["val"]) - 3)
    return _sequences(call, *names, made=(SAMPLES, SAMPLES, SAMPLES, *none))


def _sequences(call: PartCall, *names: str, made: tuple[Result, ...]) -> PartResult | None:
    tensors = [call.argument(name) for name in names]
    mask = call.argument("attn_mask") or call.argument("attn_bias")
    if mask is not None and shape_of(mask)[0] > 1:
        tensors.append(mask)
    if not _are(call, tensors, SAMPLES):
        return None
    return PartResult(made, {node: SAMPLES for node in tensors if node not in call.rows})


# Products of groups, which end where an argument says: experts with the tokens that they have.


def _grouped(call: PartCall) -> PartResult | None:
    """Rows by the weights of their groups, or for each group the sum over its rows."""
    left, right = (call.argument(name) for name in ("self", "mat2"))
    if call.argument("bias") is not None:
        return None
    return _of_groups(call, left, right)


def _grouped_fallback(call: PartCall) -> PartResult | None:
    return _of_groups(call, call.argument("input"), call.argument("weight"))


def _of_groups(call: PartCall, left: fx.Node, right: fx.Node) -> PartResult | None:
    ends = call.argument("offs")
    if ends is None or ends in call.rows or len(shape_of(left)) != 2:
        return None
    if len(shape_of(right)) == 3:
        return PartResult(SAMPLES, ends=(ends,)) if _are(call, [left], SAMPLES) else None
    own = {left: Rows(1, 1), right: SAMPLES}
    if any(call.rows.get(node, rows) != rows for node, rows in own.items()):
        return None
    needs = {node: rows for node, rows in own.items() if node not in call.rows}
    return PartResult(SUM, needs, (ends,))


def _grouped_fallback_backward(call: PartCall) -> PartResult | None:
    tensors = [call.argument(name) for name in ("input", "grad_output")]
    if call.argument("offs") in call.rows or not _are(call, tensors, SAMPLES):
        return None
    needs = {node: SAMPLES for node in tensors if node not in call.rows}
    return PartResult((SAMPLES, SUM), needs, (call.argument("offs"),))


_KERNELS = ("flash_attention_for_cpu", "flash_attention", "efficient_attention", "cudnn_attention")
ATTENTION: Mapping[str, Rule] = {
    f"aten::_scaled_dot_product_{kernel}": _attention for kernel in _KERNELS
}
ATTENTION_BACKWARD: Mapping[str, Rule] = {
    f"aten::_scaled_dot_product_{kernel}_backward": _attention_backward for kernel in _KERNELS
}
LAYER_RULES: Mapping[str, Rule] = {
    **dict.fromkeys(("aten::nll_loss_forward", "aten::nll_loss2d_forward"), _nll_loss),
    **dict.fromkeys(("aten::nll_loss_backward", "aten::nll_loss2d_backward"), _nll_loss_backward),
    "aten::native_layer_norm": _layer_norm,
    "aten::native_layer_norm_backward": _layer_norm_backward,
    "aten::native_group_norm": _samples("input", made=3),
    "aten::native_group_norm_backward": _samples_backward("grad_out", "input", "mean", "rstd"),
    "aten::convolution": _samples("input"),
    "aten::convolution_backward": _samples_backward("grad_output", "input"),
    "aten::max_pool2d_with_indices": _samples("self", made=2),
    "aten::max_pool2d_with_indices_backward": _samples("grad_output", "self", "indices"),
    "aten::avg_pool2d": _samples("self"),
    "aten::avg_pool2d_backward": _samples("grad_output", "self"),
    **ATTENTION,
    **ATTENTION_BACKWARD,
    "aten::_grouped_mm": _grouped,
    # What transformers runs where torch's own grouped product cannot be compiled.
    "transformers::grouped_mm_fallback": _grouped_fallback,
    "transformers::grouped_mm_fallback_backward": _grouped_fallback_backward,
}

"""Region terms: the term of every node of a host region, once its gradient is settled.

An op whose arithmetic is not known here, or whose result has another dtype or shape than the
parameter, is a leaf of its own: what depends on it equals no update rule.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import fx

from cotrain_compile.extract.optimizer_loops import WIDE
from cotrain_compile.runtime.host.terms import Term, Terms

aten = torch.ops.aten

# What an op computes; arguments are terms, and anything else that the node has.
Meaning = Callable[..., Term | float | None]


def region_terms(
    region: fx.GraphModule, terms: Terms, leaves: Mapping[fx.Node, Term], param: fx.Node
) -> dict[fx.Node, Term]:
    """Terms of all nodes; those in `leaves`, as the gradient, are not looked into."""
    found: dict[fx.Node, Term] = {}
    for node in region.graph.nodes:
        if node in leaves:
            found[node] = leaves[node]
        elif node.op != "output":
            computed = _computed(node, found, terms) if node.op == "call_function" else None
            is_known = computed is not None and _has_precision(node, computed, param)
            found[node] = computed if is_known and computed else terms.leaf(node)
    return found


def _computed(node: fx.Node, found: Mapping[fx.Node, Term], terms: Terms) -> Term | None:
    meaning = _MEANINGS.get(str(node.target))
    if meaning is None or not isinstance(node.meta.get("val"), torch.Tensor):
        return None

    def term(value: Any) -> Any:
        if isinstance(value, fx.Node):
            return found[value]
        return terms.of(value) if isinstance(value, int | float) else value

    known = {key: term(value) for key, value in node.kwargs.items() if key in _FACTORS}
    if {*node.kwargs} - {*known, *_LAYOUT}:
        return None
    try:
        computed = meaning(*map(term, node.args), **known)
    except TypeError:
        return None  # an argument that this op rarely has
    return None if computed is None else terms.of(computed)


_FACTORS = frozenset({"alpha", "value"})
_LAYOUT = frozenset({"dtype", "layout", "device", "pin_memory", "memory_format"})


def _has_precision(node: fx.Node, term: Term, param: fx.Node) -> bool:
    """Whether a result is as wide as the update: one of several elements has the parameter's dtype.

    A single number may be in float32 or float64, as the rates of a step and its corrections are.
    """
    value, own = node.meta["val"], param.meta["val"]
    if term.is_scalar:
        is_number = node.target is aten.scalar_tensor.default and isinstance(node.args[0], int)
        return value.dtype in WIDE or is_number
    return bool(value.dtype == own.dtype and value.shape == own.shape)


def _scaled_sum(x: Term, y: Term, alpha: Term | float = 1.0) -> Term:
    return x + y * alpha


def _lerp(x: Term, y: Term, weight: Term) -> Term:
    return x + weight * (y - x)


def _converted(x: Term, dtype: object = None) -> Term | None:
    """Only of a single number: elsewhere a cast rounds each element."""
    return x if x.is_scalar else None


_MEANINGS: Mapping[str, Meaning] = {
    "aten.add.Tensor": _scaled_sum,
    "aten.add.Scalar": _scaled_sum,
    "aten.sub.Tensor": lambda x, y, alpha=1.0: x - y * alpha,
    "aten.sub.Scalar": lambda x, y, alpha=1.0: x - y * alpha,
    "aten.rsub.Scalar": lambda x, y, alpha=1.0: y - x * alpha,
    "aten.rsub.Tensor": lambda x, y, alpha=1.0: y - x * alpha,
    "aten.mul.Tensor": lambda x, y: x * y,
    "aten.mul.Scalar": lambda x, y: x * y,
    "aten.div.Tensor": lambda x, y: x / y,
    "aten.div.Scalar": lambda x, y: x / y,
    "aten.neg.default": lambda x: -x,
    "aten.reciprocal.default": lambda x: x.terms.of(1.0) / x,
    "aten.square.default": lambda x: x * x,
    "aten.sqrt.default": lambda x: x**0.5,
    "aten.pow.Tensor_Scalar": lambda x, n: x**n,
    "aten.pow.Tensor_Tensor": lambda x, n: x**n,
    "aten.pow.Scalar": lambda x, n: x**n,
    "aten.addcmul.default": lambda x, a, b, value=1.0: x + value * (a * b),
    "aten.addcdiv.default": lambda x, a, b, value=1.0: x + value * (a / b),
    "aten.lerp.Scalar": _lerp,
    "aten.lerp.Tensor": _lerp,
    "prims.fma.default": lambda x, factor, y: x * factor + y,
    "aten.maximum.default": lambda x, y: x.terms.maximum(x, y),
    "aten.where.self": lambda flag, x, y: x.terms.choice(flag, x, y),
    "aten.scalar_tensor.default": lambda value: value,
    "aten.full.default": lambda shape, value: None if shape else value,
    "aten.zeros.default": lambda shape: None if shape else 0.0,
    "aten.copy_.default": lambda destination, value: value,
    "aten.clone.default": lambda x: x,
    "aten._to_copy.default": _converted,
    "prims.convert_element_type.default": _converted,
}

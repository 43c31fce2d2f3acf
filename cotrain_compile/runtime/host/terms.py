"""Terms: what a region computes, as expressions that do not depend on how its ops are spelled.

Two terms of one `Terms` have the same number where they are the same function of the same leaves,
over the real numbers. Spelling is all that is taken away: `add(x, y, alpha=a)` is `x + a*y`, terms
of one sum or product may be swapped, factors that are single numbers stand before a product, and
arithmetic on constants is done, in float64. Sums are neither reordered beyond two terms nor
multiplied out, so a term is never taken for another that only cancels to it.

Region terms: the term of every node of a host region, once its gradient is settled.

An op whose arithmetic is not known here, or whose result has another dtype or shape than the
parameter, is a leaf of its own: what depends on it equals no update rule.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from cotrain_compile.extract.optimizer_loops import WIDE


@dataclass(frozen=True)
class Term:
    """`is_scalar`: it follows from constants, settings and step counts alone."""

    number: int
    is_scalar: bool
    terms: Terms = field(repr=False, compare=False)

    def __add__(self, other: Term | float) -> Term:
        return self.terms.sum(self, self.terms.of(other))

    def __mul__(self, other: Term | float) -> Term:
        return self.terms.product(self, self.terms.of(other))

    def __neg__(self) -> Term:
        return self * -1.0

    def __sub__(self, other: Term | float) -> Term:
        return self + -self.terms.of(other)

    def __rsub__(self, other: float) -> Term:
        return self.terms.of(other) - self

    def __truediv__(self, other: Term | float) -> Term:
        return self.terms.quotient(self, self.terms.of(other))

    def __pow__(self, other: Term | float) -> Term:
        return self.terms.power(self, self.terms.of(other))

    __radd__, __rmul__ = __add__, __mul__


@dataclass
class Terms:
    """Makes terms, each once; what a term is made of is its key.

    A product of single numbers is one constant times other scalars in order, and any other product
    is a scalar times a term that is none.
    """

    _keys: list[tuple[object, ...]] = field(default_factory=list)
    _known: dict[tuple[object, ...], Term] = field(default_factory=dict)

    def leaf(self, name: object, *, is_scalar: bool = False) -> Term:
        """A value that is what it is: `name` tells it from all others."""
        return self._term(("leaf", name), is_scalar)

    def of(self, value: Term | float) -> Term:
        """`value` itself, or the constant that it is."""
        if isinstance(value, Term):
            return value
        return self._term(("constant", float(value)), True)

    def sum(self, a: Term, b: Term) -> Term:
        x, y = self._constant(a), self._constant(b)
        if x is not None and y is not None:
            return self.of(x + y)
        if a.is_scalar and b.is_scalar and 0.0 in (x, y):
            return b if x == 0.0 else a
        return self._in_any_order("sum", a, b)

    def product(self, a: Term, b: Term) -> Term:
        if a.is_scalar and b.is_scalar:
            (x, some), (y, others) = self._factors(a), self._factors(b)
            return self._scalar_product(x * y, (*some, *others))
        (scale_a, rest_a), (scale_b, rest_b) = self._scaled(a), self._scaled(b)
        rest = rest_a if rest_b is None else rest_b
        if rest_a is not None and rest_b is not None:
            rest = self._in_any_order("product", rest_a, rest_b)
        assert rest is not None, "two scalars are multiplied above"
        return self._times(self.product(scale_a, scale_b), rest)

    def quotient(self, a: Term, b: Term) -> Term:
        if b.is_scalar:
            return self.product(a, self.power(b, self.of(-1.0)))
        scale, rest = self._scaled(a)
        above = rest if rest is not None else self.of(1.0)
        return self._times(scale, self._term(("quotient", above.number, b.number), False))

    def power(self, base: Term, exponent: Term) -> Term:
        x, n = self._constant(base), self._constant(exponent)
        if x is not None and n is not None and x > 0 and abs(n) <= 1.0:
            return self.of(x**n)
        if n == 1.0:
            return base
        if n == 2.0:
            return self.product(base, base)
        both = base.is_scalar and exponent.is_scalar
        return self._term(("power", base.number, exponent.number), both)

    def maximum(self, a: Term, b: Term) -> Term:
        return self._in_any_order("maximum", a, b)

    def choice(self, flag: Term, if_true: Term, if_false: Term) -> Term:
        """One of two by a flag, which may be known: 1 where it is set, 0 where it is not."""
        known = self._constant(flag)
        if known is not None:
            return if_true if known else if_false
        return self._term(
            ("choice", flag.number, if_true.number, if_false.number),
            if_true.is_scalar and if_false.is_scalar,
        )

    def _in_any_order(self, kind: str, a: Term, b: Term) -> Term:
        first, second = sorted((a.number, b.number))
        return self._term((kind, first, second), a.is_scalar and b.is_scalar)

    def _term(self, key: tuple[object, ...], is_scalar: bool) -> Term:
        if key not in self._known:
            self._known[key] = Term(len(self._keys), is_scalar, self)
            self._keys.append(key)
        return self._known[key]

    def _constant(self, term: Term) -> float | None:
        kind, *parts = self._keys[term.number]
        return parts[0] if kind == "constant" else None  # type: ignore[return-value]

    def _factors(self, scalar: Term) -> tuple[float, tuple[Term, ...]]:
        kind, *parts = self._keys[scalar.number]
        if kind == "constant":
            return parts[0], ()  # type: ignore[return-value]
        if kind == "scalars":
            return parts[0], parts[1]  # type: ignore[return-value]
        return 1.0, (scalar,)

    def _scalar_product(self, constant: float, factors: tuple[Term, ...]) -> Term:
        if not factors or (constant == 1.0 and len(factors) == 1):
            return factors[0] if factors else self.of(constant)
        in_order = tuple(sorted(factors, key=lambda factor: factor.number))
        return self._term(("scalars", constant, in_order), True)

    def _scaled(self, term: Term) -> tuple[Term, Term | None]:
        """The scalar before a term, and the rest; no rest where it is a scalar itself."""
        if term.is_scalar:
            return term, None
        kind, *parts = self._keys[term.number]
        return (parts[0], parts[1]) if kind == "scaled" else (self.of(1.0), term)  # type: ignore[return-value]

    def _times(self, scale: Term, rest: Term) -> Term:
        if self._constant(scale) == 1.0:
            return rest
        return self._term(("scaled", scale, rest), False)


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

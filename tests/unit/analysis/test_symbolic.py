"""Sizes over dynamic dimensions: other values, the peak as an expression, the largest that fits."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import sympy
from hypothesis import given
from hypothesis import strategies as st

from cotrain_compile.analysis.liveness import liveness
from cotrain_compile.analysis.symbolic import at, largest, peak_expression
from cotrain_compile.dataflow import Buffer, Dataflow, Op, Phase, Role, SizeExpressions
from cotrain_compile.errors import FormatError, OptionError, PlacementError
from tests.support.dataflows import chain, random_dataflows

# As text for the program and as the function that it stands for.
SIZES: dict[str, Callable[[int, int], int]] = {
    "7": lambda s0, s1: 7,
    "4*s0": lambda s0, s1: 4 * s0,
    "s0*s1 + 3": lambda s0, s1: s0 * s1 + 3,
    "8*s0**2": lambda s0, s1: 8 * s0**2,
    "2*(s0//2)": lambda s0, s1: 2 * (s0 // 2),
    "((s0 + 7)//8)*s1": lambda s0, s1: (s0 + 7) // 8 * s1,
    "Max(100, s0*s1)": lambda s0, s1: max(100, s0 * s1),
    "16*Min(s0, s1) - s1 % 5 + 5": lambda s0, s1: 16 * min(s0, s1) - s1 % 5 + 5,
    "s1 + Mod(s0, 4)": lambda s0, s1: s1 + s0 % 4,
    "s1*CeilToInt(IntTrueDiv(s0, 32))": lambda s0, s1: s1 * -(-s0 // 32),
    "100 + (s0 - 9)//2": lambda s0, s1: 100 + (s0 - 9) // 2,
}


def _peak_at(step: Dataflow, **values: int) -> int:
    expression = peak_expression(step)
    return int(expression.subs({s: values[str(s)] for s in expression.free_symbols}))


@st.composite
def symbolic_steps(draw: st.DrawFn) -> Dataflow:
    """A random step in which some sizes are expressions over s0 and s1."""
    step = draw(random_dataflows())
    sources = st.sampled_from(sorted(SIZES))
    buffers = draw(st.dictionaries(st.sampled_from([b.name for b in step.buffers]), sources))
    ops: dict[str, str] = {}
    if step.ops:
        ops = draw(st.dictionaries(st.sampled_from([op.name for op in step.ops]), sources))
    return replace(
        step, symbols={"s0": 3, "s1": 5}, expressions=SizeExpressions(buffers, ops, dict(ops))
    )


values = st.integers(1, 1000)


@given(symbolic_steps(), values, values)
def test_a_step_at_other_values_has_the_sizes_its_expressions_give(
    step: Dataflow, s0: int, s1: int
) -> None:
    moved = at(step, {"s0": s0, "s1": s1})
    assert moved.symbols == {"s0": s0, "s1": s1}
    for before, after in zip(step.buffers, moved.buffers, strict=True):
        source = step.expressions.buffer_nbytes.get(before.name)
        nbytes = SIZES[source](s0, s1) if source else before.nbytes
        assert after == replace(before, nbytes=nbytes)
    for op, after_op in zip(step.ops, moved.ops, strict=True):
        source = step.expressions.op_flops.get(op.name)
        number = SIZES[source](s0, s1) if source else None
        assert after_op.flops == (op.flops if number is None else number)
        assert after_op.bytes_moved == (op.bytes_moved if number is None else number)


@given(symbolic_steps(), values, values)
def test_the_peak_expression_is_the_peak_at_any_values(step: Dataflow, s0: int, s1: int) -> None:
    assert _peak_at(step, s0=s0, s1=s1) == liveness(at(step, {"s0": s0, "s1": s1})).peak_bytes


def _training_step(*, batch: int = 8) -> Dataflow:
    """A chain whose activations grow with the batch s0: 256 bytes each a sample."""
    step = chain(6, batch=batch)
    grows = [b.name for b in step.buffers if b.name[0] in "xhd"]
    return replace(
        step,
        symbols={"s0": batch},
        expressions=SizeExpressions(dict.fromkeys(grows, "256*s0")),
    )


def test_the_peak_of_a_real_step_is_a_few_terms() -> None:
    expression = peak_expression(_training_step())
    s0 = sympy.Symbol("s0", integer=True, positive=True)
    matrix = 4 * 64 * 64
    # A large batch peaks in the first backward, with g5 beside all weights and moments.
    assert expression.subs(s0, 1) == liveness(at(_training_step(), {"s0": 1})).peak_bytes
    assert expression.subs(s0, 10**6) == 13 * matrix + 8 * 256 * 10**6 + 4
    assert len(expression.args) <= 7


def test_an_op_is_kept_when_a_term_of_the_other_may_be_negative() -> None:
    ops = tuple(Op(name, "test", Phase.FORWARD, (), (f"{name}_out",)) for name in "ab")
    buffers = tuple(Buffer(f"{name}_out", 100, Role.TEMPORARY) for name in "ab")
    sizes = SizeExpressions({"a_out": "100 + (s0 - s1)//2"})
    step = Dataflow("f", ops, buffers, symbols={"s0": 1, "s1": 1}, expressions=sizes)
    assert _peak_at(step, s0=1, s1=9) == 100
    assert _peak_at(step, s0=9, s1=1) == 104


def test_a_step_with_fixed_sizes_has_a_number_as_its_peak() -> None:
    step = chain(3)
    assert peak_expression(step) == liveness(step).peak_bytes
    assert peak_expression(replace(step, ops=(), updates=())) == 0


@given(st.integers(1, 300))
def test_the_largest_batch_fits_and_the_next_does_not(batch: int) -> None:
    step = _training_step()
    budget_bytes = liveness(at(step, {"s0": batch})).peak_bytes
    found = largest(step, "s0", budget_bytes)
    assert found >= batch
    assert liveness(at(step, {"s0": found})).peak_bytes <= budget_bytes
    assert liveness(at(step, {"s0": found + 1})).peak_bytes > budget_bytes


def test_the_largest_batch_stops_at_its_upper_end() -> None:
    assert largest(_training_step(), "s0", 1 << 60, upper=1000) == 1000


def test_when_not_even_one_sample_fits_the_error_says_by_how_much() -> None:
    step = _training_step()
    need = liveness(at(step, {"s0": 1})).peak_bytes
    with pytest.raises(PlacementError, match=r"s0 = 1, budget is .*100 bytes too few") as caught:
        largest(step, "s0", need - 100)
    assert caught.value.shortfall_bytes == 100


def _sized(source: str) -> Dataflow:
    op = Op("a", "test", Phase.FORWARD, (), ("t",))
    buffer = Buffer("t", 1, Role.TEMPORARY)
    expressions = SizeExpressions({"t": source})
    return Dataflow("f", (op,), (buffer,), symbols={"s0": 1}, expressions=expressions)


def test_a_peak_that_falls_has_no_largest_value() -> None:
    with pytest.raises(OptionError, match=r"falls from .* as s0 grows"):
        largest(_sized("1000 - Min(900, 100*s0)"), "s0", 950)


def test_symbols_must_be_the_ones_of_the_step() -> None:
    step = _training_step()
    with pytest.raises(OptionError, match="no value for symbol 's0'"):
        at(step, {})
    with pytest.raises(OptionError, match="unknown symbol 's1'; the symbols of this step are s0"):
        at(step, {"s0": 1, "s1": 2})
    with pytest.raises(OptionError, match="'s0' is 0; give it a positive integer"):
        at(step, {"s0": 0})
    with pytest.raises(OptionError, match="this step has none"):
        largest(chain(1), "s0", 1)


@pytest.mark.parametrize(
    "source",
    [
        "__import__('os').getcwd()",
        "s0.real",
        "s0 / 2",
        "1.5*s0",
        "s9",
        "[s0]",
        "Max(key=s0)",
        "Max()",
        "Mod(s0)",
        "CeilToInt(IntTrueDiv(s0, 0))",
        "True",
        "s0 //0",
        "s0 % (1 - 1)",
        "9**9**9",
        "((9**9)**9)**9",
        "s0**-1",
        "2**99",
        "",
        "4*s0)",
        "-" * 9000 + "1",
        "(" * 5000 + "1" + ")" * 5000,
        "+".join(["s0"] * 4000),
        "1" * 20_000,
        "\0",
    ],
)
def test_anything_but_arithmetic_is_refused(source: str) -> None:
    with pytest.raises(FormatError, match="size of 't'"):
        at(_sized(source), {"s0": 2})
    with pytest.raises(FormatError, match="size of 't'"):
        peak_expression(_sized(source))


def test_a_size_below_zero_is_refused_with_the_values() -> None:
    with pytest.raises(FormatError, match=r"'s0 - 3' is -2 at \{'s0': 1\}"):
        at(_sized("s0 - 3"), {"s0": 1})

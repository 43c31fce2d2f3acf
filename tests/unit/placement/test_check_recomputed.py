"""What may not be made again is refused, by the name of what is wrong."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from cotrain_compile.dataflow import Buffer, Collective, Dataflow, Op, Phase, Role
from cotrain_compile.errors import PlanError
from cotrain_compile.placement.check.recomputed import check_recomputed
from cotrain_compile.plan import Placement

NORM = "aten._native_batch_norm_legit_functional.default"


def op(
    name: str,
    reads: tuple[str, ...],
    writes: tuple[str, ...],
    phase: Phase = Phase.FORWARD,
    target: str = "aten.mm.default",
) -> Op:
    return Op(name, target, phase, reads, writes)


def temporary(name: str) -> Buffer:
    return Buffer(name, 8, Role.TEMPORARY)


# x -> a -> b -> out, and the backward reads a and b.
STEP = Dataflow(
    "step",
    (
        op("make_a", ("x",), ("a",)),
        op("make_b", ("a",), ("b",)),
        op("loss", ("b",), ("out",)),
        op("back", ("a", "b"), ("g",), Phase.BACKWARD),
        op("after", ("g",), ("h",), Phase.OPTIMIZER),
    ),
    (
        Buffer("x", 8, Role.BATCH, is_input=True),
        temporary("a"),
        temporary("b"),
        Buffer("out", 8, Role.TEMPORARY, is_output=True),
        temporary("g"),
        temporary("h"),
    ),
)


def of(*names: str, offloaded: tuple[str, ...] = ()) -> Placement:
    return Placement("drawn", {}, {}, offloaded=offloaded, recomputed=names)


def test_only_what_is_made_again_is_made_apart() -> None:
    check_recomputed(STEP, replace(of("a", "b"), recomputed_apart=("b",)))
    with pytest.raises(PlanError, match=r"lacks \['b'\]"):
        check_recomputed(STEP, replace(of("a"), recomputed_apart=("b",)))


def test_what_is_made_of_for_one_alone_is_read_as_it_was_then_too() -> None:
    """For b alone a is made before x is overwritten, for all others after that."""
    later = op("late", ("a",), ("k",), Phase.BACKWARD)
    back = op("back", ("b",), ("g",), Phase.BACKWARD)
    overwrite = op("write", ("g",), ("x",), Phase.BACKWARD)
    ops = (*STEP.ops[:3], back, overwrite, later, STEP.ops[-1])
    step = replace(STEP, ops=ops, buffers=(*STEP.buffers, temporary("k")))
    check_recomputed(step, of("a", "b"))
    with pytest.raises(PlanError, match="x, which it reads, was overwritten"):
        check_recomputed(step, replace(of("a", "b"), recomputed_apart=("b",)))


def with_op(step: Dataflow, index: int, new: Op) -> Dataflow:
    return replace(step, ops=(*step.ops[:index], new, *step.ops[index:]))


def but(step: Dataflow, name: str, changed: Callable[[Op], Op]) -> Dataflow:
    return replace(step, ops=tuple(changed(o) if o.name == name else o for o in step.ops))


def with_buffer(step: Dataflow, changed: Buffer) -> Dataflow:
    others = tuple(b for b in step.buffers if b.name != changed.name)
    return replace(step, buffers=(*others, changed))


@pytest.mark.parametrize("names", [(), ("a",), ("b",), ("a", "b"), ("b", "a")])
def test_what_pure_ops_of_the_forward_make_may_be_made_again(names: tuple[str, ...]) -> None:
    check_recomputed(STEP, of(*names))


@pytest.mark.parametrize(
    ("placement", "says"),
    [
        (of("a", "a"), "names a buffer twice"),
        (of("strange"), "names strange, which the step has not"),
        (of("x"), "names x, which is no value of the step's own"),
        (of("out"), "names out, which is no value of the step's own"),
        (of("a", offloaded=("a",)), "names a, as placement.offloaded does"),
        (of("g"), "names g, which the forward does not make"),
    ],
)
def test_what_is_no_value_of_the_forward_is_refused(placement: Placement, says: str) -> None:
    with pytest.raises(PlanError, match=f"unsound plan: placement.recomputed {says}"):
        check_recomputed(STEP, placement)


WRONG: dict[str, tuple[Dataflow, tuple[str, ...], str]] = {
    "another role": (
        with_buffer(STEP, Buffer("a", 8, Role.WORKSPACE)),
        ("a",),
        "names a, which is no value of the step's own",
    ),
    "made by nobody": (
        with_buffer(STEP, temporary("nothing")),
        ("nothing",),
        "names nothing, which no op of the forward makes",
    ),
    "written twice": (
        with_op(STEP, 1, op("again", ("a",), ("a",))),
        ("a",),
        "names a, which is written twice",
    ),
    "another op": (
        but(STEP, "make_a", lambda o: replace(o, target="mine.op.default")),
        ("a",),
        "has make_a run again, an op of which nobody knows",
    ),
    "writes into an input": (
        but(STEP, "make_a", lambda o: replace(o, reads=(), writes=("a", "x"))),
        ("a",),
        "has make_a run again, which writes into x",
    ),
    "writes into what another makes": (
        but(
            with_op(with_buffer(STEP, temporary("c")), 0, op("first", (), ("c",))),
            "make_a",
            lambda o: replace(o, writes=("a", "c")),
        ),
        ("a",),
        "has make_a run again, which writes into c",
    ),
    "reads what it makes": (
        but(STEP, "make_a", lambda o: replace(o, reads=("x", "a"))),
        ("a",),
        "has make_a run again, which writes into a",
    ),
    "read before it has run": (
        with_op(STEP, 0, op("early", ("a",), ("h",), Phase.BACKWARD)),
        ("a",),
        "has make_a run again before it has run",
    ),
    "its argument is overwritten": (
        with_op(STEP, 3, op("write_x", (), ("x",))),
        ("a",),
        "has make_a run again after x, which it reads, was overwritten",
    ),
    "an argument of what that is made of is overwritten": (
        with_op(
            but(STEP, "back", lambda o: replace(o, reads=("b",))), 3, op("write_x", (), ("x",))
        ),
        ("a", "b"),
        "has make_a run again after x, which it reads, was overwritten",
    ),
}


@pytest.mark.parametrize("how", WRONG)
def test_what_would_not_come_out_as_before_is_refused(how: str) -> None:
    step, names, says = WRONG[how]
    with pytest.raises(PlanError, match=f"unsound plan: placement.recomputed {says}"):
        check_recomputed(step, of(*names))


def test_what_is_overwritten_after_the_last_read_is_no_matter() -> None:
    check_recomputed(with_op(STEP, 4, op("write_x", (), ("x",))), of("a"))


# A batch norm in training, which moves its averages on.

NORMED = replace(
    STEP,
    ops=(
        op("make_a", ("x", "mean"), ("a", "save", "next"), target=NORM),
        op("move", ("next",), ("mean",), target="aten.copy_.default"),
        *STEP.ops[1:],
    ),
    buffers=(
        *STEP.buffers,
        Buffer("mean", 8, Role.BUFFER, is_input=True),
        temporary("save"),
        temporary("next"),
        temporary("other"),
    ),
)


def test_a_norm_runs_again_whose_averages_have_moved_on() -> None:
    check_recomputed(NORMED, of("a"))


@pytest.mark.parametrize(
    ("step", "names", "says"),
    [
        (NORMED, ("next",), "names next, the next average of make_a"),
        (
            but(NORMED, "make_a", lambda o: replace(o, target="aten.mm.default")),
            ("a",),
            "has make_a run again after mean",
        ),
        (
            but(NORMED, "move", lambda o: replace(o, target="aten.add_.Tensor")),
            ("a",),
            "has make_a run again after mean",
        ),
        (
            but(NORMED, "make_a", lambda o: replace(o, writes=("a", "next", "save", "other"))),
            ("a",),
            "has make_a run again after mean",
        ),
    ],
)
def test_only_averages_may_have_moved_on(step: Dataflow, names: tuple[str, ...], says: str) -> None:
    with pytest.raises(PlanError, match=f"placement.recomputed {says}"):
        check_recomputed(step, of(*names))


def test_what_has_run_again_does_not_run_once_more() -> None:
    """The second read finds what was made for the first, whatever was overwritten in between."""
    later = with_op(STEP, 4, op("back_too", ("a",), ("h",), Phase.BACKWARD))
    check_recomputed(with_op(later, 4, op("write_x", (), ("x",))), of("a"))


# A gather of a parameter, in its place among the exchanges of its group.

WHOLE = Collective("all_gather_into_tensor", 2, 16)
GATHER = Op(
    "gather",
    "_c10d_functional.all_gather_into_tensor.default",
    Phase.FORWARD,
    ("w", "order"),
    ("a", "order"),
    collective=WHOLE,
)
GATHERED = replace(
    STEP,
    ops=(
        GATHER,
        replace(op("wait", ("a",), ("a",)), awaits="gather"),
        op("exchange", ("order",), ("order",)),
        *STEP.ops[1:],
    ),
    buffers=(
        *STEP.buffers,
        Buffer("w", 8, Role.PARAM, is_input=True),
        Buffer("order", 0, Role.GROUP, is_input=True),
    ),
)


def test_a_parameter_is_gathered_again_though_its_group_has_exchanged_since() -> None:
    check_recomputed(GATHERED, of("a"))


@pytest.mark.parametrize(
    "collective", [replace(WHOLE, again=False), Collective("all_reduce", 2, 16)]
)
def test_no_other_exchange_runs_again(collective: Collective) -> None:
    step = but(GATHERED, "gather", lambda o: replace(o, collective=collective))
    with pytest.raises(PlanError, match="names a, which is written twice"):
        check_recomputed(step, of("a"))


def test_an_exchange_that_may_not_run_again_is_none_that_is_known() -> None:
    step = replace(GATHERED, ops=tuple(o for o in GATHERED.ops if o.name != "wait"))
    check_recomputed(step, of("a"))
    once = replace(WHOLE, again=False)
    with pytest.raises(PlanError, match="has gather run again, an op of which nobody knows"):
        check_recomputed(but(step, "gather", lambda o: replace(o, collective=once)), of("a"))

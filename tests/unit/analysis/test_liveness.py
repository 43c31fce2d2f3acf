"""Lifespans, gaps and live bytes on the smallest steps that show them."""

from __future__ import annotations

from hypothesis import given

from cotrain_compile.analysis.liveness import USER_HELD_ROLES, liveness
from cotrain_compile.dataflow import Buffer, Dataflow, Op, Phase, Role
from tests.support.dataflows import chain, random_dataflows


def _op(name: str, reads: str, writes: str) -> Op:
    return Op(name, "test", Phase.FORWARD, tuple(reads), tuple(writes))


def _step(ops: list[Op], *buffers: Buffer) -> Dataflow:
    return Dataflow("step", tuple(ops), buffers)


def test_a_temporary_lives_from_its_writer_to_its_last_reader() -> None:
    ops = [_op("a", "x", "t"), _op("b", "x", "u"), _op("c", "t", "v"), _op("d", "v", "w")]
    buffers = [Buffer("x", 1, Role.BATCH, is_input=True)]
    buffers += [Buffer(name, 10, Role.TEMPORARY) for name in "tuv"]
    buffers += [Buffer("w", 10, Role.TEMPORARY, is_output=True)]
    spans = liveness(_step(ops, *buffers)).lifespans
    assert (spans["t"].start, spans["t"].end, spans["t"].touches) == (0, 3, (0, 2))
    assert spans["t"].gaps == ((1, 2),)
    assert (spans["u"].start, spans["u"].end) == (1, 2)
    assert (spans["w"].start, spans["w"].end) == (3, 4)


def test_the_user_keeps_a_batch_but_not_a_temporary_input() -> None:
    ops = [_op("a", "xs", "t"), _op("b", "t", "u")]
    step = _step(
        ops,
        Buffer("x", 1, Role.BATCH, is_input=True),
        Buffer("s", 2, Role.TEMPORARY, is_input=True),
        Buffer("t", 4, Role.TEMPORARY),
        Buffer("u", 8, Role.TEMPORARY),
    )
    spans = liveness(step).lifespans
    assert (spans["x"].start, spans["x"].end) == (0, 2)
    assert (spans["s"].start, spans["s"].end) == (0, 1)
    assert liveness(step).live_bytes == (1 + 2 + 4, 1 + 4 + 8)


def test_the_peak_is_where_an_ops_inputs_and_outputs_coexist() -> None:
    ops = [_op("a", "x", "t"), _op("b", "t", "u"), _op("c", "u", "v")]
    sizes = {"x": 1, "t": 20, "u": 30, "v": 5}
    step = _step(ops, *(Buffer(n, size, Role.TEMPORARY, n == "x") for n, size in sizes.items()))
    live = liveness(step)
    assert live.live_bytes == (21, 50, 35)
    assert (live.peak_bytes, live.peak_op) == (50, 1)
    assert [buffer.name for buffer in live.live_at(1)] == ["u", "t"]


def test_an_activation_has_its_gap_between_forward_and_backward() -> None:
    step = chain(3)
    (gap,) = liveness(step).lifespans["h0"].gaps
    assert gap == (step.position["forward_1"] + 1, step.position["backward_1"])


def test_a_state_is_touched_by_its_update_alone() -> None:
    step = chain(2)
    update = step.position["update_1"]
    assert liveness(step).lifespans["m1"].touches == (update,)
    assert liveness(step).lifespans["m0"].gaps[0] == (0, step.position["update_0"])


def test_a_buffer_that_no_op_touches_takes_room_only_if_someone_holds_it() -> None:
    held = Buffer("w", 7, Role.PARAM, is_input=True)
    step = _step([_op("a", "", ""), _op("b", "", "")], held, Buffer("t", 9, Role.TEMPORARY))
    assert liveness(step).live_bytes == (7, 7)
    assert liveness(step).lifespans["t"].gaps == ()


def test_a_step_without_ops_has_no_peak() -> None:
    assert liveness(_step([], Buffer("w", 7, Role.PARAM, is_input=True))).peak_bytes == 0


@given(random_dataflows())
def test_live_bytes_are_the_sum_over_buffers_alive(step: Dataflow) -> None:
    live = liveness(step)
    for index in range(len(step.ops)):
        alive = live.live_at(index)
        assert live.live_bytes[index] == sum(buffer.nbytes for buffer in alive)
        assert {*step.ops[index].reads, *step.ops[index].writes} <= {b.name for b in alive}


@given(random_dataflows())
def test_gaps_and_touches_tile_each_lifespan(step: Dataflow) -> None:
    for name, span in liveness(step).lifespans.items():
        untouched = [index for gap in span.gaps for index in range(*gap)]
        assert sorted([*span.touches, *untouched]) == list(range(span.start, span.end))
        buffer = step.buffer[name]
        if buffer.is_output or (buffer.is_input and buffer.role in USER_HELD_ROLES):
            assert span.end == len(step.ops)

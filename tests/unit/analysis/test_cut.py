"""Offload cuts: the traffic and memory of ZeRO-Offload's table 1, computed from whole steps."""

from __future__ import annotations

from dataclasses import replace
from itertools import chain as joined
from itertools import combinations

from hypothesis import given
from hypothesis import strategies as st

from cotrain_compile.analysis.cut import Cut, offload_cuts
from cotrain_compile.dataflow import Buffer, Dataflow, Op, Phase, Role
from tests.support.dataflows import chain, mixed_precision_step
from tests.support.examples import examples

LAYERS, PARAMS = 3, 1000
TOTAL = LAYERS * PARAMS


def _by_name(step: Dataflow) -> dict[str, Cut]:
    return {cut.name: cut for cut in offload_cuts(step)}


def test_table_1_of_zero_offload() -> None:
    """16, 14, 4 and 2 bytes a parameter on the device at 0, 4, 4 and 4 of traffic."""
    cuts = offload_cuts(mixed_precision_step(LAYERS, params=PARAMS))
    assert [(cut.name, cut.device_bytes, cut.traffic_bytes) for cut in cuts] == [
        ("nothing", 16 * TOTAL, 0),
        ("gradient", 14 * TOTAL, 4 * TOTAL),
        ("param+state", 4 * TOTAL, 4 * TOTAL),
        ("gradient+param+state", 2 * TOTAL, 4 * TOTAL),
    ]


def test_the_update_and_both_casts_go_to_the_host_with_the_master_weights() -> None:
    cuts = _by_name(mixed_precision_step(1))
    assert cuts["nothing"].host_ops == cuts["nothing"].host_buffers == ()
    assert cuts["gradient"].host_ops == ()
    assert cuts["param+state"].host_ops == ("cast_p_0", "cast_g_0", "update_0")
    assert cuts["param+state"].host_buffers == ("p32_0", "m_0", "v_0")


def test_a_gradient_that_the_backward_itself_widens_counts_as_the_narrow_one() -> None:
    step = mixed_precision_step(1)
    cast = step.position["cast_g_0"]
    ops = list(step.ops)
    ops[cast] = replace(ops[cast], phase=Phase.BACKWARD)
    group = replace(step.updates[0], gradient="g32_0", ops=("update_0",))
    widened = replace(step, ops=tuple(ops), updates=(group,))
    assert offload_cuts(widened) == offload_cuts(step)


def test_without_a_low_precision_copy_the_host_keeps_a_weight_of_its_own() -> None:
    """float32 with one moment: 12 bytes a parameter; gradient down and weight up are 4 each."""
    step = chain(2, width=10)
    cuts = _by_name(step)
    assert cuts["nothing"].device_bytes == 12 * 200
    assert cuts["param+state"].device_bytes == (4 + 4) * 200
    assert cuts["param+state"].traffic_bytes == (4 + 4) * 200
    assert cuts["gradient+param+state"].device_bytes == 4 * 200


def test_streaming_one_moment_moves_as_much_as_a_host_update_in_float32() -> None:
    """State up and down is 8 bytes too, so the cut with the update on the device is as good."""
    cut = _by_name(chain(2, width=10))["state"]
    assert cut.traffic_bytes == 8 * 200
    assert cut.host_ops == ()


def test_two_moments_are_too_dear_to_stream() -> None:
    assert "state" not in _by_name(mixed_precision_step(2))


def _with_clipping(step: Dataflow) -> Dataflow:
    """The step with a norm over all gradients in front of the updates, read by each of them."""
    norm = Op(
        "norm", "test.norm", Phase.OPTIMIZER, tuple(g.gradient for g in step.updates), ("n",), 9, 9
    )
    before = tuple(op for op in step.ops if op.phase is not Phase.OPTIMIZER)
    after = tuple(
        replace(op, reads=(*op.reads, "n")) if op.name.startswith("update") else op
        for op in step.ops
        if op.phase is Phase.OPTIMIZER
    )
    buffers = (*step.buffers, Buffer("n", 4, Role.TEMPORARY))
    return replace(step, ops=(*before, norm, *after), buffers=buffers)


def test_a_norm_over_all_gradients_goes_where_they_are_updated_and_sends_them_once() -> None:
    cuts = _by_name(_with_clipping(mixed_precision_step(LAYERS, params=PARAMS)))
    assert "norm" in cuts["param+state"].host_ops
    assert "norm" not in cuts["gradient"].host_ops
    assert {cut.traffic_bytes for cut in cuts.values()} == {0, 4 * TOTAL}


def _subsets(names: list[str]) -> list[frozenset[str]]:
    sizes = range(len(names) + 1)
    return [frozenset(c) for c in joined.from_iterable(combinations(names, n) for n in sizes)]


def _traffic_bytes(step: Dataflow, host: frozenset[str]) -> int:
    """Copies that a step with one parameter needs when the ops and buffers `host` are there."""
    total = 0
    for buffer in step.buffers:
        for phase in Phase:
            ops = [op for op in step.ops if op.phase is phase]
            for users in (
                [op for op in ops if buffer.name in op.writes],
                [op for op in ops if buffer.name in op.reads],
            ):
                apart = any((op.name in host) != (buffer.name in host) for op in users)
                total += buffer.nbytes * apart
    return total


@examples(10)
@given(st.lists(st.integers(0, 50), min_size=8, max_size=8))
def test_no_way_to_split_the_step_moves_less(sizes: list[int]) -> None:
    """Against every split of a one-parameter step with buffers of any sizes."""
    names = ["p32_0", "m_0", "v_0", "p16_0", "g16_0", "g32_0", "lr", "n"]
    step = _with_clipping(mixed_precision_step(1))
    nbytes = dict(zip(names, sizes, strict=True))
    buffers = tuple(replace(b, nbytes=nbytes.get(b.name, 99)) for b in step.buffers)
    step = replace(step, buffers=buffers)
    free = _subsets(["cast_p_0", "norm", "cast_g_0", "update_0", "g32_0", "lr", "n"])
    classes = {"gradient": "g16_0", "weight": "p16_0", "param": "p32_0", "state": "m_0 v_0"}
    least = {
        "+".join(chosen): min(
            _traffic_bytes(step, rest.union(*(classes[name].split() for name in chosen)))
            for rest in free
        )
        for size in range(1, 5)
        for chosen in combinations(classes, size)
    }
    cuts = _by_name(step)
    assert cuts.pop("nothing").traffic_bytes == 0
    fewest = min(least.values())
    assert {name: cut.traffic_bytes for name, cut in cuts.items()} == {
        name: traffic for name, traffic in least.items() if traffic <= fewest * 1.01
    }


def test_a_view_of_a_gradient_fetches_nothing() -> None:
    step = mixed_precision_step(1)
    view = Op("view", "aten.t", Phase.FORWARD, ("p16_0", "g16_0"), ())
    assert offload_cuts(replace(step, ops=(*step.ops, view))) == offload_cuts(step)


def test_a_step_without_updates_has_nothing_to_cut() -> None:
    assert offload_cuts(replace(chain(1), updates=())) == ()


def test_a_gradient_at_home_on_the_host_is_finished_before_it_is_sent() -> None:
    step = mixed_precision_step(1)
    add = Op("add", "aten.add_", Phase.BACKWARD, ("g16_0",), ("g16_0",), 1, 1)
    last = step.position["backward_0"] + 1
    longer = replace(step, ops=(*step.ops[:last], add, *step.ops[last:]))
    assert _by_name(longer)["gradient"].traffic_bytes == 4 * PARAMS

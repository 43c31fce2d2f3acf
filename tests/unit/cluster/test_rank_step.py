"""Steps of ranks that shard: made of a step whose figures are counted by hand, and planned."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cotrain_compile.analysis.symbolic import at
from cotrain_compile.cluster.answer.strategies import answer
from cotrain_compile.cluster.ranks.rank_plan import (
    NoRankPlan,
    RankPlan,
    in_micro_batches,
    plan_answered_rank,
    plan_rank,
)
from cotrain_compile.cluster.ranks.rank_step import (
    replica_step,
    require_exchangeable,
    shard_step,
    with_typed_gradients,
)
from cotrain_compile.cluster.sources.traced_profile import profile_on_cluster
from cotrain_compile.dataflow import Collective, Dataflow, Phase, Role
from cotrain_compile.errors import OptionError, PlacementError
from cotrain_compile.files import from_json, to_json
from tests.support.clusters import a_box
from tests.unit.cluster.test_traced_profile import op, step


def with_casts() -> Dataflow:
    """The gradient of w1 has half of its bytes; a norm and the update both cast it."""
    whole = step()
    norm = (
        op("wide", Phase.BACKWARD, "g1", "g1w"),
        op("norm", Phase.OPTIMIZER, "g1w", "n"),
        op("cast", Phase.OPTIMIZER, "g1", "g1c"),
    )
    ops = {each.name: each for each in whole.ops}
    ops["u1"] = replace(ops["u1"], reads=("g1c", "w1", "m1", "n"))
    at_cast = [*ops.values()]
    place = [each.name for each in at_cast].index("b0w")
    (w1,) = (b for b in whole.buffers if b.name == "w1")
    temporary = replace(w1, role=Role.TEMPORARY, is_input=False, is_output=False)
    added = [replace(temporary, name=name) for name in ("g1w", "g1c")]
    half = (replace(b, nbytes=30) if b.name == "g1" else b for b in whole.buffers)
    group = replace(whole.updates[1], ops=("cast", "u1"))
    return replace(
        whole,
        ops=(*at_cast[:place], *norm[:2], *at_cast[place:-1], norm[2], at_cast[-1]),
        buffers=(*half, *added, replace(temporary, name="n", nbytes=4)),
        updates=(whole.updates[0], group),
    )


def test_every_tensor_of_a_rank_is_whole_only_where_it_is_used() -> None:
    sized = at(step(), {"s0": 2})
    made = shard_step(sized, 4)
    made.verify_read()
    nbytes = {name: made.buffer[name].nbytes for name in ("w0", "w1", "m1", "g0", "g1", "a")}
    assert nbytes == {"w0": 10, "w1": 15, "m1": 15, "g0": 40, "g1": 60, "a": 200}
    assert [each.collective for each in made.ops if each.collective] == [
        Collective("all_gather_into_tensor", 4, 40),
        Collective("all_gather_into_tensor", 4, 60),
        Collective("reduce_scatter_tensor", 4, 60),
        Collective("reduce_scatter_tensor", 4, 40),
    ]
    of = {each.name: each for each in made.ops}
    assert of["f1"].reads == ("x", "w1.whole")
    assert of["b1"].reads == ("dy", "w1.whole")
    assert of["u1"].reads == ("g1.part", "w1", "m1")
    assert made.update["w1"].gradient == "g1.part"
    assert made.buffer["g1.part"].nbytes == 15
    assert shard_step(sized, 1) is sized


def test_small_tensors_of_a_layer_go_together_behind_the_last_of_them() -> None:
    """The norm of the first gradient waits for its part, as does the update."""
    text = to_json(at(with_casts(), {"s0": 1}))
    for name in ("w0", "w1"):
        text = text.replace(f'"{name}"', f'"layers.0.{name}"')
    made = shard_step(with_typed_gradients(from_json(text, Dataflow)), 2)
    made.verify_read()
    assert [each.collective.nbytes for each in made.ops if each.collective] == [100, 100]
    names = [each.name for each in made.ops]
    assert names.index("b0w") + 1 == names.index("reduce_scatter_tensor.g1w.part")
    assert names.index("norm") == names.index("wait.reduce_scatter_tensor.g1w.part") + 1


def test_a_gradient_is_cast_once_and_scattered_in_the_type_of_its_parameter() -> None:
    made = shard_step(with_typed_gradients(at(with_casts(), {"s0": 1})), 2)
    made.verify_read()
    of = {each.name: each for each in made.ops}
    assert "cast" not in of
    assert of["norm"].reads == ("g1w.part",)
    assert of["u1"].reads == ("g1w.part", "w1", "m1", "n")
    assert made.update["w1"].ops == ("u1",)
    assert made.buffer["g1w.part"].nbytes == 30
    assert made.buffer["n"].nbytes == 4


def test_micro_batches_have_their_own_exchanges_and_add_up_parts_for_one_update() -> None:
    one = shard_step(with_typed_gradients(at(with_casts(), {"s0": 1})), 2)
    made = in_micro_batches(one, 3)
    made.verify_read()
    assert in_micro_batches(one, 1) is one
    begun = Counter(each.collective.kind for each in made.ops if each.collective)
    assert begun == {"all_gather_into_tensor": 6, "reduce_scatter_tensor": 6}
    of = {each.name: each for each in made.ops}
    assert of["add.g1w.part.sum1"].reads == ("g1w.part.batch0", "g1w.part.batch1")
    assert of["add.g1w.part.sum2"].reads == ("g1w.part.sum1", "g1w.part.batch2")
    # Norm and update come once, and read what is added up; parameters and states are there once.
    assert of["norm"].reads == ("g1w.part.sum2",)
    assert of["u1"].reads == ("g1w.part.sum2", "w1", "m1", "n")
    assert made.update["w1"].gradient == "g1w.part.sum2"
    assert made.total_bytes(Role.PARAM, Role.OPTIMIZER_STATE) == one.total_bytes(
        Role.PARAM, Role.OPTIMIZER_STATE
    )
    assert made.total_bytes(Role.BATCH) == 3 * one.total_bytes(Role.BATCH)


def test_a_replica_sums_gradients_of_all_micro_batches_once_behind_the_backward() -> None:
    one = with_typed_gradients(at(with_casts(), {"s0": 1}))
    made = replica_step(in_micro_batches(one, 2), 4)
    made.verify_read()
    assert [each.collective for each in made.ops if each.collective] == [
        Collective("all_reduce", 4, 60),
        Collective("all_reduce", 4, 40),
    ]
    names = [each.name for each in made.ops]
    begin, wait = names.index("all_reduce.g1w.sum1.summed"), "wait.all_reduce.g1w.sum1.summed"
    assert names[begin - 1] == "add.g1w.sum1"
    assert names.index("b0w.batch1") < names.index(wait) < names.index("norm")
    of = {each.name: each for each in made.ops}
    assert of["u1"].reads == ("g1w.sum1.summed", "w1", "m1", "n")
    assert made.buffer["w1"].nbytes == one.buffer["w1"].nbytes
    assert replica_step(one, 1) is one


def test_what_has_no_parts_is_refused() -> None:
    sized = at(step(), {"s0": 1})
    kept = tuple(replace(b, param="w0") if b.name == "g0" else b for b in sized.buffers)
    ops = tuple(replace(o, flops=5) if o.name == "u1" else o for o in sized.ops)
    for wrong, told in (
        (shard_step(sized, 2), "between ranks already"),
        (replace(sized, buffers=kept), "nobody knows what ranks exchange of them"),
    ):
        with pytest.raises(OptionError, match=told):
            require_exchangeable(wrong)
    multiplies = replace(sized, ops=ops)
    with pytest.raises(OptionError, match="the update of w1 multiplies matrices"):
        shard_step(multiplies, 2)
    assert replica_step(multiplies, 2).ranks == 2
    with pytest.raises(OptionError, match="a rank of burst is planned by no solver"):
        plan_rank(step(), a_box(2, 1e9), "burst", 2, 4)


@given(st.sampled_from(("replicate", "shard")), st.integers(60, 1500), st.sampled_from((1, 2, 4)))
@settings(max_examples=15, deadline=None)
def test_a_plan_of_a_rank_is_within_its_device_and_never_below_its_bound(
    strategy: str, capacity_bytes: int, ranks: int
) -> None:
    try:
        found = plan_rank(step(), a_box(ranks, 1e9, capacity_bytes), strategy, ranks, 4)
    except PlacementError:
        assert capacity_bytes < 1200  # all that is alive at once, of four samples on one device
        return
    assert found.peak_bytes <= capacity_bytes
    assert found.bound_s <= found.step_s


def test_the_first_strategy_that_can_be_planned_is_or_is_told_not_to_fit() -> None:
    """Where the exchange is dear one device is best; where nothing fits, all are tried."""
    for capacity_bytes, kind, devices in ((10**6, RankPlan, 1), (20, NoRankPlan, 2)):
        cluster = a_box(2, 1e9, capacity_bytes)
        profile = profile_on_cluster("net", step(), cluster)
        found = answer(profile, cluster, 4, ["burst", "shard"])
        rank = plan_answered_rank(found, step(), cluster)
        assert isinstance(rank, kind)
        assert (rank.strategy, rank.devices) == ("shard", devices)
        assert (found.best is None) == isinstance(rank, NoRankPlan)
        assert f"of {rank.devices} ranks of shard" in str(rank)
        assert "plan" not in rank.figures()
    with pytest.raises(OptionError, match="ask for replicate or shard too"):
        plan_answered_rank(answer(profile, cluster, 4, ["burst"]), step(), cluster)

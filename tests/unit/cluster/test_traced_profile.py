"""Traced profiles: a step of two layers and a head, whose figures can be counted by hand.

ids -> layers.0: a (inner), x -> layers.1: y -> head: loss
"""

from __future__ import annotations

from dataclasses import replace

import pytest

from cotrain_compile.cluster.model.profiles import BATCH
from cotrain_compile.cluster.sources.traced_profile import profile_of_step, sample_symbols
from cotrain_compile.dataflow import (
    Buffer,
    Dataflow,
    Job,
    Op,
    Phase,
    Role,
    SizeExpressions,
    UpdateGroup,
)
from cotrain_compile.errors import OptionError
from cotrain_compile.files import from_json, to_json
from cotrain_compile.machine import HostUpdate, Link, TierSpec, two_tier

TIER = TierSpec(10**9, 1000.0, {"float32": 1e12})
MACHINE = two_tier("test", TIER, TIER, Link(1e3), Link(1e3), HostUpdate(100.0))
# Bytes for every sample.
GROWS = {"ids": 8, "a": 100, "x": 10, "y": 20, "dy": 20, "dx": 10, "da": 100}
FIXED = {"loss": 4, "w0": 40, "w1": 60, "g0": 40, "g1": 60, "m1": 60}
ROLES = {"ids": Role.BATCH, "w0": Role.PARAM, "w1": Role.PARAM, "m1": Role.OPTIMIZER_STATE}


def op(name: str, phase: Phase, reads: str, writes: str, module: str = "") -> Op:
    return Op(name, "op", phase, tuple(reads.split()), tuple(writes.split()), 0, 0, module=module)


OPS = (
    op("f0", Phase.FORWARD, "ids w0", "a", "layers.0"),
    op("f0b", Phase.FORWARD, "a", "x", "layers.0.act"),
    op("f1", Phase.FORWARD, "x w1", "y", "layers.1"),
    op("f2", Phase.FORWARD, "y", "loss"),
    op("b2", Phase.BACKWARD, "y", "dy"),
    op("b1", Phase.BACKWARD, "dy w1", "dx"),
    op("b0", Phase.BACKWARD, "dx a", "da"),
    op("b1w", Phase.BACKWARD, "dy x", "g1"),  # late: the layer before has begun
    op("b0w", Phase.BACKWARD, "da ids", "g0"),
    op("u0", Phase.OPTIMIZER, "g0 w0", "w0"),
    op("u1", Phase.OPTIMIZER, "g1 w1 m1", "w1 m1"),
)
# Each op moves as many bytes as it writes.
MOVED = {o.name: o.writes[0] for o in OPS if o.phase is not Phase.OPTIMIZER}


def step() -> Dataflow:
    sizes = {name: f"{n}*s0" for name, n in GROWS.items()}
    return Dataflow(
        "f",
        tuple(replace(o, bytes_moved=FIXED.get(MOVED.get(o.name, "w0"), 0)) for o in OPS),
        tuple(
            Buffer(
                name,
                n,
                ROLES.get(name, Role.TEMPORARY),
                is_input=name in ROLES,
                is_output=name in ("w0", "w1", "m1", "loss"),
            )
            for name, n in {**GROWS, **FIXED}.items()
        ),
        (
            UpdateGroup("w0", "g0", (), (), ("u0",)),
            UpdateGroup("w1", "g1", ("m1",), (), ("u1",)),
        ),
        symbols={"s0": 1},
        expressions=SizeExpressions(
            sizes, {}, {o: sizes[made] for o, made in MOVED.items() if made in sizes}
        ),
    )


@pytest.mark.parametrize("n", [1, 3, 64, 100])
def test_every_figure_of_a_layer_is_that_of_its_ops_at_any_batch(n: int) -> None:
    """3 lies between two sizes that were asked for, 100 beyond the last."""
    profile = profile_of_step("net", step(), MACHINE)
    first, second, head = profile.layers
    assert [layer.name for layer in profile.layers] == ["layers.0", "layers.1", "head"]
    assert profile.is_chain
    assert [layer.input_bytes(n) for layer in profile.layers] == [8 * n, 10 * n, 20 * n]
    assert [layer.forward_s.at(n) for layer in profile.layers] == pytest.approx(
        [0.11 * n, 0.02 * n, 0.004]
    )
    assert [layer.backward_s.at(n) for layer in profile.layers] == pytest.approx(
        [0.1 * n + 0.04, 0.01 * n + 0.06, 0.02 * n]
    )
    assert [layer.kept(n) for layer in profile.layers] == [110 * n, 20 * n, 0]
    assert first.forward_peak(n) == 40 + 110 * n
    # With x for the late gradient of the next layer, and its own gradient at the end.
    assert first.backward_peak(n) == pytest.approx(40 + max(210 * n, 100 * n + 40), abs=1e-9)
    assert second.forward_peak(n) == 60 + 20 * n
    assert head.backward_peak(n) == 4 + 20 * n


def test_what_is_made_again_belongs_to_its_layer_and_moves_no_other_op() -> None:
    """Of the input's: a value that the backward of a layer reads is made again from the batch."""
    again = op("again", Phase.BACKWARD, "a", "ra")
    whole = step()
    i = [o.name for o in whole.ops].index("b1")
    later = replace(whole.ops[i], reads=(*whole.ops[i].reads, "ra"))
    changed = replace(
        whole,
        ops=(*whole.ops[:i], again, later, *whole.ops[i + 1 :]),
        buffers=(*whole.buffers, Buffer("ra", 0, Role.TEMPORARY)),
    )
    before, after = (profile_of_step("net", each, MACHINE) for each in (whole, changed))
    assert [layer.backward_s for layer in after.layers] == [
        layer.backward_s for layer in before.layers
    ]


def test_what_is_beside_the_layers_is_named_by_its_modules() -> None:
    """Not by one that holds the layers: a stage cannot begin there."""
    modules = {"f0": "net", "f0b": "net.embed", "f1": "net.layers.1", "f2": "net.norm"}
    named = replace(
        step(), ops=tuple(replace(o, module=modules.get(o.name, "")) for o in step().ops)
    )
    profile = profile_of_step("net", named, MACHINE)
    assert [layer.name for layer in profile.layers] == ["net.embed", "net.layers.1", "net.norm"]


def test_a_layer_knows_its_parameters_gradients_states_and_update() -> None:
    first, second, head = profile_of_step("net", step(), MACHINE).layers
    assert (first.param_bytes, first.grad_bytes, first.state_bytes) == (40, 40, 0)
    assert (second.param_bytes, second.grad_bytes, second.state_bytes) == (60, 60, 60)
    assert (head.param_bytes, head.grad_bytes, head.host_update_s) == (0, 0, 0.0)
    assert first.host_update_s == pytest.approx(3 * 40 / 100)  # reads both, writes one
    assert second.reads[0].source == "layers.0"
    assert first.reads[0].source == BATCH


def test_a_traced_profile_is_saved_as_any_other() -> None:
    profile = profile_of_step("net", step(), MACHINE, tokens_per_sample=16)
    assert from_json(to_json(profile), type(profile)) == profile
    assert "nothing was run" in profile.assumed[0]


def test_the_samples_of_several_tensors_are_one_number() -> None:
    apart = replace(step(), symbols={"s0": 1, "s1": 7})
    profile = profile_of_step("net", apart, MACHINE, ["s0", "s1"])
    assert profile == profile_of_step("net", step(), MACHINE, ["s0"])
    with pytest.raises(OptionError, match=r"no symbol given.*s0 \(now 1\), s1 \(now 7\)"):
        profile_of_step("net", apart, MACHINE)
    with pytest.raises(OptionError, match="s2 given for the samples"):
        profile_of_step("net", apart, MACHINE, ["s2"])


@pytest.mark.parametrize(
    ("shapes", "counted"),
    [
        ([(4, 16), (4,)], ["s0", "s1"]),
        ([(4, 4)], []),  # the other dimension has that size too
        ([(4, 16), (2,)], []),  # the tensors begin with different sizes
        ([()], []),
    ],
)
def test_samples_are_counted_by_what_the_batch_begins_with_if_that_is_told_apart(
    shapes: list[tuple[int, ...]], counted: list[str]
) -> None:
    batch = {str(i): shape for i, shape in enumerate(shapes)}
    apart = replace(step(), symbols={"s0": 4, "s1": 4, "s2": 16}, job=Job(batch=batch))
    if counted:
        assert list(sample_symbols(apart)) == counted
        assert "counted by s0, s1" in profile_of_step("net", apart, MACHINE).assumed[1]
        assert list(sample_symbols(apart, ["s2"])) == ["s2"]
    else:
        with pytest.raises(OptionError, match="no symbol given for the samples"):
            sample_symbols(apart)


def test_a_step_of_fixed_sizes_is_refused() -> None:
    fixed = replace(step(), symbols={}, expressions=SizeExpressions())
    with pytest.raises(OptionError, match="--dynamic"):
        profile_of_step("net", fixed, MACHINE)

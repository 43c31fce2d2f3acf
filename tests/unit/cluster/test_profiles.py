"""Layer profiles: figures by samples, layers that read one another, and three file formats."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cotrain_compile.cluster.model.profiles import (
    BATCH,
    BySamples,
    Layer,
    LayerProfile,
    Read,
    chain,
    constant,
    per_sample,
)
from cotrain_compile.cluster.sources.profile_files import TOGETHER, parse_profile, read_profile
from cotrain_compile.errors import FormatError, OptionError
from cotrain_compile.files import load, save
from tests.support.examples import examples

DATA = Path(__file__).parents[2] / "data"
HARMONY = DATA / "harmony_bert_large.json"
DEEPPOOL = DATA / "deeppool_wrn101_2_a100.json"
TABLE = BySamples((2, 4, 8), (10.0, 30.0, 40.0))


def layer(name: str, *reads: str) -> Layer:
    return Layer(
        name=name,
        op="linear",
        reads=tuple(Read(source, per_sample(8)) for source in reads),
        forward_s=constant(1.0),
        backward_s=constant(2.0),
        param_bytes=4,
        grad_bytes=4,
    )


@pytest.mark.parametrize(
    ("samples", "figure"), [(2, 10), (3, 20), (4, 30), (6, 35), (8, 40), (16, 60), (1, 0), (0.5, 0)]
)
def test_a_figure_is_linear_between_and_beyond_what_was_measured(
    samples: float, figure: float
) -> None:
    assert TABLE.at(samples) == figure


def test_beyond_the_last_measurement_more_samples_never_take_less() -> None:
    assert BySamples((1, 2, 4), (1.0, 5.0, 4.0)).at(400) == 4.0


def test_what_was_measured_once_is_the_same_for_all() -> None:
    assert [constant(3.0).at(n) for n in (0.25, 1, 64)] == [3.0] * 3
    assert [per_sample(3.0).at(n) for n in (0.25, 1, 64)] == [0.75, 3.0, 192.0]


@pytest.mark.parametrize("samples", [0, -1, float("nan")])
def test_no_samples_are_refused(samples: float) -> None:
    with pytest.raises(OptionError, match="at least one sample"):
        TABLE.at(samples)


@examples(40)
@given(
    st.lists(st.integers(1, 64), min_size=1, max_size=5, unique=True).map(sorted),
    st.data(),
    st.integers(1, 100),
)
def test_every_measured_figure_is_given_back_and_none_is_negative(
    samples: list[int], data: st.DataObject, asked: int
) -> None:
    figures = [data.draw(st.floats(0, 1e12)) for _ in samples]
    table = BySamples(tuple(samples), tuple(figures))
    assert [table.at(n) for n in samples] == figures
    assert table.at(asked) >= 0


@pytest.mark.parametrize(
    ("samples", "figures", "told"),
    [
        ((), (), "at least one"),
        ((1, 2), (1.0,), "one for each"),
        ((2, 1), (1.0, 1.0), "must rise"),
        ((0, 1), (1.0, 1.0), "at least 1"),
        ((1,), (-1.0,), "not negative"),
        ((1,), (float("inf"),), "finite"),
    ],
)
def test_a_table_that_cannot_be_is_refused(
    samples: tuple[int, ...], figures: tuple[float, ...], told: str
) -> None:
    with pytest.raises(ValueError, match=told):
        BySamples(samples, figures)


def test_layers_know_who_reads_them() -> None:
    profile = LayerProfile("block", (layer("a", BATCH), layer("b", "a"), layer("add", "a", "b")))
    assert profile.readers == {BATCH: ("a",), "a": ("b", "add"), "b": ("add",), "add": ()}
    assert profile.layers[2].input_bytes(3) == 48
    assert not profile.is_chain
    assert LayerProfile("chain", profile.layers[:2]).is_chain


@pytest.mark.parametrize(
    ("layers", "told"),
    [
        ((), "at least one layer"),
        ((layer("a", "b"), layer("b", BATCH)), "reads .'b'., no layers before it"),
        ((layer("a", BATCH), layer("a", BATCH)), "two layers are named a"),
    ],
)
def test_layers_that_do_not_follow_one_another_are_refused(
    layers: tuple[Layer, ...], told: str
) -> None:
    with pytest.raises(ValueError, match=told):
        LayerProfile("none", layers)


def test_bert_large_is_read_as_harmony_measured_it() -> None:
    profile = read_profile(HARMONY)
    data = json.loads(HARMONY.read_text(encoding="utf-8"))
    assert profile.is_chain
    assert len(profile.layers) == 28
    assert profile.param_bytes == sum(data["param_bytes"])
    first = profile.layers[0]
    assert first.forward_s.at(8) == data["fwd_s"]["8"][0]
    again = first.forward_s.at(8) + first.backward_s.at(8)
    assert again == pytest.approx(data["bwd_incl_recompute_s"]["8"][0], rel=1e-15)
    # Measured peaks have the input in them, those of a profile have not.
    assert first.backward_peak(4) + first.input_bytes(4) == data["bwd_mem"]["4"][0]
    assert first.input_bytes(4) == data["input_act_bytes"]["4"][0]
    assert first.host_update_s == data["upd_cpu_s"][0]
    assert profile.assumed == ()


def test_wide_resnet_is_read_as_deeppool_measured_it() -> None:
    """The whole is as measured; how it is split is said to be assumed."""
    profile = read_profile(DEEPPOOL)
    data = json.loads(DEEPPOOL.read_text(encoding="utf-8"))
    assert len(profile.layers) == 39
    assert TOGETHER in profile.assumed
    for got, told in zip(profile.layers, data["layers"], strict=True):
        for samples, ms in told["forward_backward_ms"].items():
            assert got.compute_s(int(samples)) == pytest.approx(ms / 1e3, rel=1e-12)
        assert got.input_bytes(32) == 32 * told["input_bytes_per_sample"]


def test_a_figure_that_was_not_measured_is_asked_for_in_vain() -> None:
    with pytest.raises(OptionError, match="layer conv2d0 has no forward_peak_bytes"):
        read_profile(DEEPPOOL).layers[0].forward_peak(1)


@pytest.mark.parametrize("path", [HARMONY, DEEPPOOL])
def test_a_saved_profile_is_read_back(path: Path, tmp_path: Path) -> None:
    profile = read_profile(path)
    save(profile, tmp_path / "profile.json")
    assert load(tmp_path / "profile.json", LayerProfile) == profile
    assert read_profile(tmp_path / "profile.json") == profile


def without(name: str) -> Callable[[dict[str, Any]], object]:
    return lambda document: document.pop(name)


@pytest.mark.parametrize(
    ("path", "spoil", "told"),
    [
        (HARMONY, without("upd_cpu_s"), "upd_cpu_s: Field required"),
        (HARMONY, lambda d: d["param_bytes"].pop(), "param_bytes has 27 figures for 28 layers"),
        (HARMONY, lambda d: d["fwd_mem"]["4"].pop(), "fwd_mem.4 has 27 figures"),
        (HARMONY, lambda d: d["fwd_s"].update({"0": d["fwd_s"]["1"]}), "fwd_s is by numbers"),
        (HARMONY, lambda d: d["fwd_s"]["2"].__setitem__(3, "1"), r"fwd_s\.2\.3: .*number"),
        (HARMONY, lambda d: d["fwd_s"]["2"].__setitem__(3, 9.0), "layer 3: .* at 2 samples"),
        (DEEPPOOL, lambda d: d["layers"][5].pop("op"), r"layers\.5\.op: Field required"),
        (DEEPPOOL, lambda d: d["layers"][0].update(param_bytes=-1), r"layers\.0\.param_bytes"),
        (DEEPPOOL, lambda d: d["layers"].clear(), "layers: List should have at least 1"),
        (DEEPPOOL, without("layers"), "kind is missing"),
    ],
)
def test_a_bad_file_is_refused_with_the_place(
    path: Path, spoil: Callable[[dict[str, Any]], object], told: str
) -> None:
    document = json.loads(path.read_text(encoding="utf-8"))
    spoil(document)
    with pytest.raises(FormatError, match=f"^spoilt: {told}"):
        parse_profile(json.dumps(document), "spoilt")


@pytest.mark.parametrize("text", ["", "[]", "{", "3", '{"kind": "plan"}'])
def test_what_is_no_profile_is_refused(text: str) -> None:
    with pytest.raises(FormatError, match="spoilt"):
        parse_profile(text, "spoilt")


def test_the_reads_of_a_chain() -> None:
    tables = [per_sample(1), per_sample(2)]
    assert chain(tables, ["a", "b"]) == ((Read(BATCH, tables[0]),), (Read("a", tables[1]),))

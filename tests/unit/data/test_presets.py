"""Presets: plausible figures with a source, found by name or file; limits read from cgroups."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from cotrain_compile.cluster.model.machines import seen_from, side_by_side
from cotrain_compile.errors import OptionError
from cotrain_compile.files import load, save
from cotrain_compile.machine import Machine
from cotrain_compile.presets import (
    ADAMW_BYTES_PER_PARAMETER,
    PRESETS,
    THIS_MACHINE,
    find,
    published_range_s,
    refuse_other_ranks,
    this_machine,
    with_changes,
)
from cotrain_compile.presets.cards import CARDS, Card
from cotrain_compile.presets.factors import RANGE
from cotrain_compile.support.limits import (
    cgroup_cores,
    cgroup_memory_limit_bytes,
    usable_core_count,
    usable_memory_bytes,
)
from cotrain_compile.viz.text.describe import describe_machine

DATA = Path(__file__).parents[2] / "data" / "zero_offload_tables.json"
NAMES = {
    *("rtx3060", "rtx3070", "rtx3080", "rtx3080-12", "rtx3080ti", "rtx3090"),
    *("rtx4060", "rtx4060ti-8", "rtx4060ti-16", "rtx4070", "rtx4070-super", "rtx4070ti"),
    *("rtx4070ti-super", "rtx4080", "rtx4080-super", "rtx4090"),
    *("rtx5070", "rtx5070ti", "rtx5080", "rtx5090"),
    *("rtx3060-laptop", "rtx3070-laptop", "rtx3080-laptop", "rtx4060-laptop", "rtx4070-laptop"),
    *("rtx4080-laptop", "rtx4090-laptop", "rtx5070-laptop", "rtx5070ti-laptop"),
    *("rtx5080-laptop", "rtx5090-laptop"),
    *("a6000", "rtx6000-ada", "rtxpro6000"),
    *("v100-16", "v100-32", "v100-dgx2", "v100-pcie-16", "v100-pcie-32"),
    *("t4", "a10", "a40", "l4", "l40s"),
    *("a100-40", "a100-80", "a100-pcie-40", "a100-pcie-80"),
    *("h20", "h100-pcie", "h100", "h200", "gh200", "b200", "gb200"),
    *("8xrtx4090", "8xa100", "8xh100", "8xh200", "2xgh200"),
}


def test_every_promised_machine_is_there_under_its_name() -> None:
    assert set(PRESETS) == NAMES
    assert all(machine.name == name for name, machine in PRESETS.items())


@pytest.mark.parametrize("machine", PRESETS.values(), ids=lambda machine: machine.name)
def test_a_preset_says_where_each_kind_of_figure_comes_from(machine: Machine) -> None:
    source = machine.source.lower()
    for words in (
        ("tflop/s",),
        ("memory", "tb/s", "gb/s"),
        ("pcie", "nvlink"),
        ("host update", "adam"),
    ):
        assert any(word in source for word in words), words
    assert "data sheet" in source or "measured by" in source


@pytest.mark.parametrize("card", CARDS, ids=lambda card: card.name)
def test_a_card_has_the_memory_that_its_driver_reports(card: Card) -> None:
    assert card.mib % 1024, "a driver keeps some of it"
    assert PRESETS[card.name].device.capacity_bytes == card.mib << 20
    assert PRESETS[card.name].compute_capability == card.chip


def test_cards_of_one_chip_differ_by_their_power() -> None:
    """By published steps: AD102 does more with 450 W than with 300; PCIe is no SXM."""
    rates = {card.name: card.bfloat16 for card in CARDS}
    assert 0.7 * rates["rtx4090"] < rates["rtx6000-ada"] < 0.85 * rates["rtx4090"]
    assert rates["rtx6000-ada"] < rates["l40s"] < 0.4 * 362
    assert 1.2 < rates["a100-80"] / rates["a100-pcie-80"] < rates["a100-40"] / rates["a100-pcie-40"]
    assert rates["a10"] < 0.6 * rates["a6000"]
    assert rates["rtx4090-laptop"] < 0.5 * rates["rtx4090"]


@pytest.mark.parametrize("machine", PRESETS.values(), ids=lambda machine: machine.name)
def test_a_preset_has_the_order_of_a_real_machine(machine: Machine) -> None:
    """Device memory is faster than host memory, which is no slower than an update that uses it."""
    assert machine.device.bytes_per_s > machine.host.bytes_per_s
    assert machine.host_update.bytes_per_s <= machine.host.bytes_per_s
    assert machine.h2d.bytes_per_s < machine.host.bytes_per_s
    assert machine.host.capacity_bytes > machine.device.capacity_bytes
    assert machine.device.flops_per_s_of("float16") > machine.device.flops_per_s_of("float32")


def test_a_rank_has_a_card_of_its_own_and_its_share_of_the_host() -> None:
    rank, alone = PRESETS["8xh100"], PRESETS["h100"]
    assert rank.device == alone.device
    assert 8 * rank.host.capacity_bytes == 2000 * 10**9
    assert 8 * rank.host.bytes_per_s == pytest.approx(460e9)
    assert rank.host_update.bytes_per_s < alone.host_update.bytes_per_s
    assert rank.network is not None
    assert alone.network is None


@pytest.mark.parametrize(
    ("of_step", "asked", "machine", "message"),
    [
        (1, 8, "8xh100", "a step of one process; .*trace it again with .*--ranks 8"),
        (2, 8, "8xh100", "the step of 2 ranks"),
        (16, None, "8xh100 link=20GB", "one of 16 ranks and 8xh100 link=20GB has 8 cards"),
    ],
)
def test_a_step_of_other_ranks_is_refused(
    of_step: int, asked: int | None, machine: str, message: str
) -> None:
    with pytest.raises(OptionError, match=message):
        refuse_other_ranks(of_step, asked, machine)
    refuse_other_ranks(8, 8, machine)


def test_the_v100_updates_at_the_rate_that_zero_offload_measured() -> None:
    table = json.loads(DATA.read_text(encoding="utf-8"))["table4_adam_s"]
    rates = [b * 1e9 / s for b, s in zip(table["params_B"], table["cpu_adam"], strict=True)]
    per_s = PRESETS["v100-dgx2"].host_update.bytes_per_s / ADAMW_BYTES_PER_PARAMETER
    assert min(rates) <= per_s <= max(rates)
    assert per_s == pytest.approx(rates[-1])  # the largest model of the table


def test_bfloat16_on_a_card_without_it_runs_at_the_float32_rate() -> None:
    v100 = PRESETS["v100-dgx2"].device
    assert v100.flops_per_s_of("bfloat16") == v100.flops_per_s_of("float32")


@pytest.mark.parametrize("name", ["rtx4080", "rtx4090", "rtx5090", "l40s", "h100", "h200", "b200"])
def test_float8_runs_at_twice_the_rate_where_the_card_has_it(name: str) -> None:
    device = PRESETS[name].device
    for dtype in ("float8_e4m3fn", "float8_e5m2"):
        assert device.flops_per_s_of(dtype) == pytest.approx(
            2 * device.flops_per_s_of("bfloat16"), rel=0.03
        )
    for older in ("rtx3090", "a6000", "a100-80"):
        spec = PRESETS[older].device
        assert spec.flops_per_s_of("float8_e4m3fn") == spec.flops_per_s_of("float32")


def test_what_follows_a_name_is_changed_and_found_again() -> None:
    plain = PRESETS["rtx4090"]
    name = with_changes("rtx4090", host_memory="192 GiB", device_memory=None, link="48GB")
    assert name == "rtx4090 host-memory=192GiB link=48GB"
    found = find(name)
    assert found.name == name
    assert found.host.capacity_bytes == 192 * 2**30
    assert found.device == plain.device
    assert (found.h2d.bytes_per_s, found.d2h.bytes_per_s) == (48e9, 48e9)
    assert found.source.endswith("Changed by hand: host-memory=192GiB, link=48GB.")
    assert find("rtx4090 device-memory=48GiB").device.capacity_bytes == 48 * 2**30


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("h999 host-memory=1GiB", "no machine named 'h999'"),
        ("h100 memory=1GiB", "'memory=1GiB' after a machine's name is none of device-memory"),
        ("h100 host-memory=80%", "host-memory is '80%', but must be bytes"),
        ("h100 link=fast", "link is 'fast', but must be"),
    ],
)
def test_a_change_that_is_none_is_refused(name: str, told: str) -> None:
    with pytest.raises(OptionError, match=re.escape(told)):
        find(name)


def test_a_machine_is_found_by_name_or_in_a_file(tmp_path: Path) -> None:
    path = tmp_path / "mine.json"
    save(PRESETS["h100"], path)
    assert find("h100") == PRESETS["h100"]
    assert find(str(path)) == PRESETS["h100"]


def test_an_unknown_machine_error_lists_the_known_ones() -> None:
    with pytest.raises(OptionError, match=r"'h999'.*rtx4090.*this-machine.*calibrate"):
        find("h999")


def test_this_machine_stays_within_what_the_process_may_use() -> None:
    machine = find("this-machine")
    assert machine == this_machine()
    assert machine.device.capacity_bytes + machine.host.capacity_bytes <= usable_memory_bytes()
    assert usable_core_count() >= 1
    assert "nothing measured" in machine.source


def write(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text, encoding="utf-8")
    return root


@pytest.mark.parametrize(
    ("files", "limit_bytes", "cores"),
    [
        ({}, None, None),
        ({"memory.max": "max\n", "cpu.max": "max 100000\n"}, None, None),
        ({"memory.max": "8589934592\n", "cpu.max": "150000 100000\n"}, 8 * 2**30, 1.5),
        (
            {
                "memory/memory.limit_in_bytes": "9223372036854771712\n",
                "cpu/cpu.cfs_quota_us": "-1\n",
                "cpu/cpu.cfs_period_us": "100000\n",
            },
            None,
            None,
        ),
        (
            {
                "memory/memory.limit_in_bytes": "1073741824\n",
                "cpu/cpu.cfs_quota_us": "400000\n",
                "cpu/cpu.cfs_period_us": "100000\n",
            },
            2**30,
            4.0,
        ),
    ],
    ids=["none", "v2 unlimited", "v2 limited", "v1 unlimited", "v1 limited"],
)
def test_cgroup_limits_are_read_in_both_versions(
    tmp_path: Path, files: dict[str, str], limit_bytes: int | None, cores: float | None
) -> None:
    root = write(tmp_path, files)
    assert cgroup_memory_limit_bytes(root) == limit_bytes
    assert cgroup_cores(root) == cores


def test_a_machine_of_several_devices_is_described_but_no_plan_is_made_for_it(
    tmp_path: Path,
) -> None:
    two = side_by_side(PRESETS["rtx4090"], 2)
    save(two, tmp_path / "two.json")
    assert load(tmp_path / "two.json", Machine) == two
    told = describe_machine(two)
    assert "link         h2d1 from host to device1" in told
    assert "shared       h2d0, h2d1: 1.00 times one of them" in told
    with pytest.raises(
        OptionError, match=r"one device and its host.* device0, device1, host, disk .*seen"
    ):
        find(str(tmp_path / "two.json"))
    one = seen_from(two, "device0")
    save(one, tmp_path / "one.json")
    assert find(str(tmp_path / "one.json")) == one
    assert one.but(name="rtx4090") == PRESETS["rtx4090"]


def test_a_device_sees_of_the_link_what_the_others_leave() -> None:
    """Of two devices under 1.0 each way, 1.8 both: four busy links have 1.8 / 4 each."""
    one = PRESETS["rtx4090"].but(duplex=1.8)
    two = side_by_side(one, 2)
    assert seen_from(two, "device0").h2d.bytes_per_s == one.h2d.bytes_per_s
    assert seen_from(two, "device0").duplex == pytest.approx(1.8)
    crowded = seen_from(two, "device0", crowded=True)
    assert crowded.h2d.bytes_per_s == pytest.approx(one.h2d.bytes_per_s * 1.8 / 4)
    with pytest.raises(ValueError, match="no link from device7 to host"):
        seen_from(two, "device7")


def test_published_steps_bound_what_a_preset_predicts_and_nothing_else() -> None:
    found = published_range_s("h100 host-memory=192GiB", 2.0)
    assert found is not None
    assert found[0] < 2.0 < found[1]
    assert published_range_s("my-machine", 2.0) is None


def test_the_range_is_that_of_compiled_steps_in_the_last_fit() -> None:
    fitted = json.loads(Path("bench/results/published_steps.json").read_text())["result"]
    assert fitted["published over predicted, eight of ten"]["compiled"] == list(RANGE)


def test_factors_are_of_cards_and_follow_what_they_differ_in() -> None:
    a100, h100 = (find(name).device.factors for name in ("a100-80", "h100"))
    assert a100["product"] == h100["product"]
    assert a100["one_by_one"] < h100["one_by_one"]
    assert find(THIS_MACHINE).device.factors == {}


def test_tf32_runs_at_half_the_rate_of_bfloat16_where_there_is_any() -> None:
    a100, v100 = find("a100-80").device, find("v100-16").device
    assert a100.flops_per_s_of("tfloat32") == a100.flops_per_s_of("bfloat16") / 2
    assert v100.flops_per_s_of("tfloat32") == v100.flops_per_s_of("float32")

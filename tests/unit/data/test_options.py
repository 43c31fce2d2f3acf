"""Options: sizes and settings are read as written, and an error says what would have been right."""

from __future__ import annotations

import os
import re
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cotrain_compile.errors import OptionError
from cotrain_compile.machine import Tier
from cotrain_compile.options import Options
from cotrain_compile.options.parsers import POLICIES
from cotrain_compile.presets import find
from cotrain_compile.support.units import Size

GIB = 2**30


@pytest.mark.parametrize(
    ("text", "nbytes"),
    [
        (1, 1),
        (20 * GIB, 20 * GIB),
        ("20GiB", 20 * GIB),
        ("20 gib", 20 * GIB),
        (" 1.5 MiB ", 3 * 2**19),
        ("500 MB", 500_000_000),
        ("2kb", 2000),
        ("1 TiB", 2**40),
        ("77", 77),
        ("77 B", 77),
        ("20G", 20 * 10**9),
        ("20 Gi", 20 * GIB),
        ("2e9", 2 * 10**9),
        (20e9, 20 * 10**9),
        (np.int64(GIB), GIB),
        (np.float32(1024), 1024),
    ],
)
def test_a_size_in_bytes_does_not_depend_on_the_capacity(text: object, nbytes: int) -> None:
    assert Size.parse(text).of(1) == nbytes
    assert Size.parse(text).of(80 * GIB) == nbytes


@pytest.mark.parametrize(("text", "nbytes"), [("80%", 80), ("12.5 %", 12), ("100%", 100)])
def test_a_percentage_is_of_the_capacity_rounded_down(text: str, nbytes: int) -> None:
    assert Size.parse(text).of(100) == nbytes


@pytest.mark.parametrize(
    "bad",
    [
        0,
        -1,
        True,
        1.5,
        None,
        "",
        "GiB",
        "20 bananas",
        "-3GiB",
        "0",
        "0.1",
        "0.0001KiB",
        "0%",
        "101%",
        "1,5GiB",
        float("nan"),
        float("inf"),
        2**61,
        "10 PiBs",
    ],
)
def test_what_is_not_a_size_is_refused_with_examples(bad: object) -> None:
    with pytest.raises(ValueError, match=r'"20GiB", or a percentage such as "80%"'):
        Size.parse(bad)


@pytest.mark.parametrize(
    ("value", "says"),
    [
        ("0", "is '0', but must be above 0"),
        (-1, "is -1, but must be above 0"),
        ("0.2", "must be a whole number of bytes"),
        (0.8, "must be a whole number of bytes"),
        ("150%", "must be above 0% and at most 100% of what the tier has"),
        (10 * 2**60, "must be at most 1 EiB, which is more than any tier has"),
        ("20 bananas", "'bananas' is no unit"),
    ],
)
def test_a_size_that_cannot_be_says_what_is_wrong_with_it(value: object, says: str) -> None:
    with pytest.raises(OptionError, match=re.escape(says)):
        Options.parse({"memory_budget": value})


@given(st.integers(1, 2**53))
def test_bytes_come_back_as_given(nbytes: int) -> None:
    assert Size.parse(nbytes) == Size.parse(str(nbytes)) == Size(nbytes=nbytes)


@given(st.integers(1, 10_000), st.sampled_from(["KiB", "MiB", "GiB", "TiB"]))
def test_binary_units_are_powers_of_1024(number: int, unit: str) -> None:
    power = ["KiB", "MiB", "GiB", "TiB"].index(unit) + 1
    assert Size.parse(f"{number}{unit}") == Size(nbytes=number * 1024**power)


def test_no_options_are_the_defaults() -> None:
    assert Options.parse({}) == Options()


def test_every_option_is_read() -> None:
    core = min(os.sched_getaffinity(0))
    options = Options.parse(
        {
            "memory_budget": "2 GiB",
            "host_memory_budget": "50%",
            "device": "cpu",
            "policy": "zero-offload",
            "plan": "plan.json",
            "solver": "cbc",
            "time_limit": 5,
            "gap": 0.05,
            "seed": 7,
            "lowering": "eager",
            "inductor": {"max_autotune": True},
            "eager_segments": ["model.layers.3:*"],
            "remat": True,
            "host_kernels": "captured",
            "host_cores": [core],
            "keep_grads": True,
            "on_break": "warn",
            "dump": "out",
            "machine": "my.json",
            "throttle": True,
            "poison": False,
            "profile": "profile.json",
            "live": 5,
        }
    )
    assert options == Options(
        memory_budget=Size(nbytes=2 * GIB),
        host_memory_budget=Size(fraction=0.5),
        device="cpu",
        policy="zero-offload",
        plan="plan.json",
        solver="cbc",
        time_limit=5.0,
        gap=0.05,
        seed=7,
        lowering="eager",
        inductor={"max_autotune": True},
        eager_segments=("model.layers.3:*",),
        remat=True,
        host_kernels="captured",
        host_cores=(core,),
        keep_grads=True,
        on_break="warn",
        dump="out",
        machine="my.json",
        throttle=True,
        poison=False,
        profile="profile.json",
        live=5.0,
    )


def test_the_emulated_device_runs_eager_kernels_unless_asked() -> None:
    assert Options().lowering_on("cpu") == "eager"
    assert Options().lowering_on("cuda") == "inductor"
    assert Options(lowering="eager").lowering_on("cuda") == "eager"


def test_values_are_made_again_where_that_is_fused_unless_asked() -> None:
    assert not Options().remat_on("cpu")
    assert Options(lowering="inductor").remat_on("cpu")
    assert not Options(remat=False).remat_on("cuda")
    assert Options(remat=True).remat_on("cpu")


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"policy": "magic"}, "option 'policy' is 'magic', but must be one of auto, resident"),
        ({"device": "tpu"}, "one of 'cpu', 'cuda'"),
        ({"on_break": True}, "one of 'error', 'warn'"),
        ({"host_kernels": ""}, "one of 'fused', 'captured'"),
        ({"keep_grads": "yes"}, "must be True or False"),
        ({"throttle": 1}, "must be True or False"),
        ({"dump": ""}, "must be a non-empty string"),
        ({"memory_budget": "lots"}, "a number of bytes"),
        ({"plan": 3}, "must be a non-empty string"),
        ({"solver": "gurobi"}, "one of 'highs', 'cbc'"),
        ({"time_limit": 0}, "must be a number of seconds above 0"),
        ({"time_limit": float("nan")}, "must be a number of seconds above 0"),
        ({"time_limit": float("inf")}, "must be a number of seconds above 0"),
        ({"time_limit": "60"}, "must be a number of seconds above 0"),
        ({"time_limit": True}, "must be a number of seconds above 0"),
        ({"gap": 1}, "must be a fraction from 0 to below 1"),
        ({"gap": -0.01}, "must be a fraction from 0 to below 1"),
        ({"gap": "1%"}, "must be a fraction from 0 to below 1"),
        ({"gap": True}, "must be a fraction from 0 to below 1"),
        ({"lowering": "onnx"}, "one of 'eager', 'inductor'"),
        ({"inductor": ["max_autotune"]}, "must be a dictionary of settings by name"),
        ({"eager_segments": "model.layers.3:1"}, "must be a list of non-empty strings"),
        ({"eager_segments": [""]}, "must be a list of non-empty strings"),
        ({"remat": 1}, "must be True or False"),
        ({"live": 0}, "must be True, False or a number of seconds above 0"),
        ({"live": "often"}, "must be True, False or a number of seconds above 0"),
        ({"seed": -1}, "must be an integer from 0 to 2147483647"),
        ({"seed": 0.5}, "must be an integer from 0 to 2147483647"),
    ],
)
def test_a_bad_value_is_refused_with_what_it_may_be(options: dict[str, Any], says: str) -> None:
    with pytest.raises(OptionError, match=re.escape(says)):
        Options.parse(options)


@pytest.mark.parametrize("share", ["0", "0.25", "1", ".5"])
def test_a_fraction_is_a_share(share: str) -> None:
    assert Options.parse({"policy": f"fraction:{share}"}).policy == f"fraction:{share}"


@pytest.mark.parametrize("policy", POLICIES)
def test_every_policy_named_in_the_error_is_accepted(policy: str) -> None:
    assert Options.parse({"policy": policy}).policy == policy


@pytest.mark.parametrize("share", ["", "1.5", "-1", "half", "nan", "auto:1"])
def test_what_is_not_a_share_is_refused(share: str) -> None:
    with pytest.raises(OptionError, match="F from 0 to 1"):
        Options.parse({"policy": f"fraction:{share}"})


@pytest.mark.parametrize("policy", [None, 1, ["resident"]])
def test_a_policy_is_a_name(policy: object) -> None:
    with pytest.raises(OptionError, match="option 'policy'"):
        Options.parse({"policy": policy})


def test_an_unknown_option_is_refused_with_the_nearest_and_all_there_are() -> None:
    with pytest.raises(OptionError) as caught:
        Options.parse({"memory_buget": 1})
    message = str(caught.value)
    assert "unknown option 'memory_buget' (did you mean 'memory_budget'?)" in message
    assert all(name in message for name in vars(Options()))


@pytest.mark.parametrize(
    ("word", "meant"),
    [("budget", "memory_budget"), ("time", "time_limit"), ("order", "micro_batch_order")],
)
def test_a_word_of_its_name_leads_to_the_option(word: str, meant: str) -> None:
    with pytest.raises(OptionError, match=re.escape(f"(did you mean '{meant}'?)")):
        Options.parse({word: 1})


@pytest.mark.parametrize(
    ("options", "near"),
    [
        ({"policy": "zero_offload"}, "zero-offload"),
        ({"policy": "residnet"}, "resident"),
        ({"micro_batch_order": "by_layer"}, "by-layer"),
        ({"on_break": "warning"}, "warn"),
    ],
)
def test_a_misspelled_value_is_refused_with_the_one_that_was_meant(
    options: dict[str, Any], near: str
) -> None:
    with pytest.raises(OptionError, match=re.escape(f"(did you mean '{near}'?)")):
        Options.parse(options)


def test_nothing_is_proposed_where_nothing_is_near() -> None:
    with pytest.raises(OptionError, match=r"one of 'cpu', 'cuda'$"):  # a GPU is not meant by "cpu"
        Options.parse({"device": "gpu"})


def test_ranks_of_a_computer_plan_for_equal_parts_of_a_drive(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By what torchrun says; a budget of the user's is that of each rank."""
    usage = shutil.disk_usage(tmp_path)._replace(free=4_000_000)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage)

    def budget(ranks: str, **options: Any) -> int:
        monkeypatch.setenv("LOCAL_WORLD_SIZE", ranks)
        parsed = Options.parse({"disk": tmp_path, **options})
        return parsed.budgets(find("rtx4090"))[Tier.DISK]

    assert budget("") == 3_600_000
    assert budget("4") == 900_000
    assert budget("4", disk_budget="50%") == 2_000_000

"""A configuration of another framework: its step, our options, and every setting accounted for."""

from __future__ import annotations

import json
import re
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from cotrain_compile import files
from cotrain_compile.cli.main import app
from cotrain_compile.errors import FormatError
from cotrain_compile.migrate.counterparts import (
    Counterpart,
    Optimizer,
    Precision,
    Ranks,
    Training,
    Way,
    settings,
)
from cotrain_compile.migrate.read import options_of, read, step_text
from cotrain_compile.options import Options
from tests.support.dataflows import chain

CONFIGS = Path(__file__).parents[2] / "data" / "configs"
FILES = {
    "ds_zero3.json": "DeepSpeed",
    "ds_fp16.json": "DeepSpeed",
    "accelerate_fsdp.yaml": "Accelerate",
    "axolotl_lora.yaml": "axolotl",
    "torchtune_full.yaml": "torchtune",
    "ds_of_many.json": "DeepSpeed",
    "accelerate_deepspeed.yaml": "Accelerate",
    "accelerate_fsdp1.yaml": "Accelerate",
    "axolotl_dpo.yml": "axolotl",
    "torchtune_distributed.yaml": "torchtune",
}
UNKNOWN = {
    "ds_zero3.json": ["some_new_setting"],
    "torchtune_distributed.yaml": [
        "use_fp8",
        "kd_ratio",
        "quantizer._component_",
        "quantizer.groupsize",
    ],
}


def written(tmp_path: Path, document: Any, name: str = "config.json") -> Path:
    file = tmp_path / name
    file.write_text(document if isinstance(document, str) else json.dumps(document))
    return file


def told(file: Path) -> dict[str, Counterpart]:
    return {one.setting: one for one in read(file).counterparts}


@pytest.mark.parametrize("name", FILES)
def test_a_file_is_known_by_its_settings_and_all_of_them_have_a_meaning(name: str) -> None:
    found = read(CONFIGS / name)
    assert found.framework == FILES[name]
    unknown = [one.setting for one in found.counterparts if one.way is Way.UNKNOWN]
    assert unknown == UNKNOWN.get(name, [])
    Options.parse(options_of(found.training))
    compile(step_text(found.training), name, "exec")


def test_what_deepspeed_says_of_a_step() -> None:
    found = read(CONFIGS / "ds_zero3.json").training
    assert found == Training(
        optimizer=Optimizer(
            "torch.optim.AdamW",
            {"lr": 1e-5, "betas": [0.9, 0.95], "eps": 1e-8, "weight_decay": 0.1},
        ),
        precision=Precision.AUTOCAST_BF16,
        micro_batches=4,
        clip=1.0,
        offloads=True,
        disk="/nvme",
    )
    assert options_of(found) == {"device": "cuda", "disk": "/nvme"}


def test_what_a_trainer_is_to_fill_in_says_nothing() -> None:
    found = read(CONFIGS / "ds_fp16.json").training
    assert (found.micro_batches, found.clip) == (1, None)
    assert "scaler.scale(loss).backward()" in step_text(found)


def test_adam_of_deepspeed_decays_as_adamw_unless_it_is_told_not_to(tmp_path: Path) -> None:
    config = {"optimizer": {"type": "Adam", "params": {"adam_w_mode": False}}}
    found = read(written(tmp_path, config)).training.optimizer
    assert found == Optimizer("torch.optim.Adam")


def test_several_processes_of_accelerate_share_the_model() -> None:
    found = read(CONFIGS / "accelerate_fsdp.yaml").training
    assert found.ranks is Ranks.SHARDS
    assert found.offloads
    assert "fully_shard(model)" in step_text(found)
    assert options_of(found) == {}


@pytest.mark.parametrize(
    ("name", "ranks", "said"),
    [
        ("accelerate_fsdp1.yaml", Ranks.REPLICAS, "DistributedDataParallel(model)"),
        ("accelerate_deepspeed.yaml", Ranks.SHARDS, "fully_shard(layer)"),
        ("axolotl_dpo.yml", Ranks.SHARDS, "fully_shard(layer)"),
        ("torchtune_distributed.yaml", Ranks.SHARDS, "fully_shard(layer)"),
        ("ds_of_many.json", Ranks.ONE, "torch.optim.Muon(model.parameters(), lr=0.02"),
    ],
)
def test_who_has_the_model_is_in_the_step(name: str, ranks: Ranks, said: str) -> None:
    found = read(CONFIGS / name).training
    assert found.ranks is ranks
    assert said in step_text(found)
    assert ("device" in options_of(found)) is (ranks is Ranks.ONE)


def test_a_loss_of_preferences_is_in_the_step() -> None:
    counterpart = told(CONFIGS / "axolotl_dpo.yml")["rl"]
    assert (counterpart.way, counterpart.value) == (Way.STEP, "dpo")


def test_numbers_that_yaml_reads_as_words_are_numbers() -> None:
    optimizer = read(CONFIGS / "axolotl_lora.yaml").training.optimizer
    assert optimizer == Optimizer("torch.optim.AdamW", {"lr": 2e-4, "weight_decay": 0.0})
    recipe = read(CONFIGS / "torchtune_full.yaml").training
    assert recipe.optimizer == Optimizer("torch.optim.AdamW", {"lr": 2e-5})
    assert recipe.precision is Precision.WEIGHTS_BF16


def test_an_offloading_optimizer_is_the_one_that_it_wraps(tmp_path: Path) -> None:
    recipe = """
model: {_component_: torchtune.models.llama3_2.llama3_2_1b}
optimizer:
  _component_: torchao.optim.CPUOffloadOptimizer
  optimizer: torch.optim.SGD
  offload_gradients: true
  lr: 1e-3
"""
    found = read(written(tmp_path, recipe, "recipe.yaml")).training
    assert found.optimizer == Optimizer("torch.optim.SGD", {"lr": 1e-3})


def test_an_optimizer_that_torch_has_not_is_told_in_the_step(tmp_path: Path) -> None:
    found = read(written(tmp_path, {"optimizer": {"type": "OneBitAdam"}})).training
    assert "OneBitAdam(model.parameters())  # none of torch" in step_text(found)


@pytest.mark.parametrize("off", [False, None, "none", "no"])
def test_what_is_off_is_not_in_the_step(tmp_path: Path, off: object) -> None:
    config = {"bf16": {"enabled": off}, "zero_optimization": {"offload_param": {"device": off}}}
    found = read(written(tmp_path, config)).training
    assert found.precision is Precision.AS_BUILT
    assert not found.offloads


def test_no_setting_is_left_out_and_none_is_told_twice(tmp_path: Path) -> None:
    document = {
        "zero_optimization": {"stage": 2, "new": {"a": 1, "b": {}}},
        "x": [{"y": 1}],
        "z": None,
    }
    found = read(written(tmp_path, document)).counterparts
    names = Counter(one.setting for one in found)
    assert names == Counter(path for path, _ in settings(document))
    assert set(names.values()) == {1}
    unknown = {one.setting for one in found if one.way is Way.UNKNOWN}
    assert unknown == {"zero_optimization.new.a", "zero_optimization.new.b", "x", "z"}


@pytest.mark.parametrize(
    ("name", "text", "said"),
    [
        ("a.json", "{'zero_optimization': 1}", "is no json"),
        ("a.yaml", "a: [1", "is no yaml"),
        ("a.yaml", "- 1\n- 2", "no settings by name, but list"),
        ("a.json", '{"epochs": 3, "lr": 1}', "known; its first ones are epochs, lr"),
        ("a.yaml", "", "no settings by name, but NoneType"),
        ("a.yaml", "base_model: x\noptimizer: [a, b]", "is no name in Python"),
        ("a.json", '{"optimizer": {"type": "A(0); import os"}}', "is no name in Python"),
        ("a.yaml", "optimizer: {_component_: torch.optim.SGD, 'lr=1)#': 2}", "is no name in"),
    ],
)
def test_what_is_no_configuration_is_refused(
    tmp_path: Path, name: str, text: str, said: str
) -> None:
    with pytest.raises(FormatError, match=said):
        read(written(tmp_path, text, name))


def said(*arguments: str) -> str:
    found = CliRunner().invoke(app, ["from-config", *arguments])
    assert found.exit_code == 0, found.output
    return found.stdout


def test_the_command_says_what_a_plan_would_gain(tmp_path: Path) -> None:
    files.save(chain(3), tmp_path / "step.json")
    step = ("--step", str(tmp_path / "step.json"), "--machine", "rtx4090")
    lines = said(str(CONFIGS / "ds_zero3.json"), *step, "--memory-budget", "100KiB").splitlines()
    assert "Not known to this command" in lines
    start = next(i for i, line in enumerate(lines) if line.startswith("The step of"))
    took = dict(re.split(r" {2,}", line.strip()) for line in lines[start + 2 :])
    assert took["everything on the device"] == "does not fit"
    assert "µs" in took["all optimizer states streamed"]


def test_the_command_has_json() -> None:
    document = json.loads(said(str(CONFIGS / "ds_zero3.json"), "--json"))
    assert document["framework"] == "DeepSpeed"
    assert len(document["settings"]) == 27

"""The command line traces a language model's configuration, with no file of one's own."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from cotrain_compile import files
from cotrain_compile.cli.main import app
from cotrain_compile.dataflow import Dataflow, Job, Role
from cotrain_compile.errors import OptionError

CONFIG = {
    "model_type": "llama",
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "vocab_size": 100,
    "max_position_embeddings": 16,
}
TOO_FEW = "def too_few(): return (lambda x, y: x), (1,)"
# 2 * 100 * 32 of embedding and head, 4 * 32 * 32 + 3 * 32 * 64 of the layer, 3 * 32 of norms.
PARAMETERS = 16_736


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    (tmp_path / "vit.json").write_text('{"model_type": "vit"}')
    (tmp_path / "words.json").write_text('{"model_type": "llama", "hidden_size": "x"}')
    (tmp_path / "zero.json").write_text('{"model_type": "llama", "num_attention_heads": 0}')
    negative = {**CONFIG, "intermediate_size": -64}
    (tmp_path / "negative.json").write_text(json.dumps(negative))
    (tmp_path / "job.py").write_text("def build(): ...\n" + TOO_FEW)
    return tmp_path


def traced(job: Path, output: Path, *asked: str) -> Dataflow:
    call = ("trace", str(job), "-o", str(output), *asked)
    result = CliRunner().invoke(app, call, catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return files.load(output, Dataflow)


def test_the_usual_step_of_a_configuration_is_traced(folder: Path) -> None:
    asked = ("--optimizer", "sgd", "--batch", "3", "--length", "16")
    dataflow = traced(folder / "config.json", folder / "step.json", *asked)
    held = [buffer for buffer in dataflow.buffers if buffer.role is Role.PARAM]
    assert sum(buffer.nbytes for buffer in held) == 4 * PARAMETERS  # of float32, as of bf16-mixed
    assert dataflow.job == Job("LlamaForCausalLM", {"tokens": (3, 16)})
    assert all(len(group.states) == 1 for group in dataflow.updates)  # momentum


@pytest.mark.parametrize(
    ("job", "asked", "told"),
    [
        ("config.json", ("--length", "17"), "--length 17: .*has positions for 16 tokens"),
        ("absent.json", (), "there is no such file"),
        ("vit.json", ("--length", "16"), "no causal language model for the type 'vit'"),
        ("words.json", (), "cannot read this configuration: .*'hidden_size'"),
        ("zero.json", (), "cannot read this configuration: ZeroDivisionError"),
        ("negative.json", ("--length", "16"), "cannot build a model of these numbers: .*negative"),
        ("job.py:too_few", (), "with the 1 arguments .* missing a required argument: 'y'"),
        ("job.py:build", ("--batch", "2"), "--batch: for configurations only"),
    ],
)
def test_what_cannot_be_traced_is_told(
    folder: Path, job: str, asked: tuple[str, ...], told: str
) -> None:
    with pytest.raises(OptionError, match=told):
        traced(folder / job, folder / "step.json", *asked)

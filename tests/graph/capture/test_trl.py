"""TRL's trainers with this backend train as TRL's own do, and a tracker's files say how.

TRL, datasets and TensorBoard are in no list of ours: where they are not installed this is skipped.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate.state import AcceleratorState
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast, set_seed

from cotrain_compile.integrations.trackers import to_tensorboard
from tests.support.packages_beside import module
from tests.support.pages import ROOT, blocks

pytestmark = [pytest.mark.long, pytest.mark.filterwarnings("ignore")]  # theirs, of many kinds
PAGE = ROOT / "docs" / "frameworks.md"
OPTIONS = {"policy": "zero-offload", "quiet": True}
WORDS = ["<pad>", "<eos>", *(f"w{n}" for n in range(30))]


def tokenizer() -> PreTrainedTokenizerFast:
    """Of single words, without a download."""
    tokenizers = module("tokenizers")
    words = {word: number for number, word in enumerate(WORDS)}
    one = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="<pad>"))
    one.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    fast: Any = PreTrainedTokenizerFast
    words_only: PreTrainedTokenizerFast = fast(
        tokenizer_object=one, pad_token="<pad>", eos_token="<eos>"
    )
    return words_only


def small_llama() -> LlamaForCausalLM:
    set_seed(0)
    config = LlamaConfig(
        vocab_size=len(WORDS),
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
    )
    return LlamaForCausalLM(config)


def losses(trainer: Any) -> list[float]:
    trainer.train()
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


def on_the_page(trainer: str) -> Any:
    """The class that the page derives from a trainer of TRL's, by the page's own lines."""
    (page,) = (text for text in blocks(PAGE, "python") if trainer in text)
    names: dict[str, Any] = {}
    exec(compile(page[: page.find("\n\n\ntrainer = ")], str(PAGE), "exec"), names)
    return names[f"My{trainer}"]


SETTINGS: dict[str, Any] = {
    "per_device_train_batch_size": 2,
    "max_steps": 4,
    "logging_steps": 1,
    "learning_rate": 1e-2,
    "report_to": "none",
    "save_strategy": "no",
    "use_cpu": True,
    "bf16": False,
    "gradient_checkpointing": False,
}


@pytest.mark.parametrize("adapter", [False, True], ids=["whole", "lora"])
def test_sft(adapter: bool, tmp_path: Path) -> None:
    trl, datasets, peft = module("trl"), module("datasets"), module("peft")
    data = datasets.Dataset.from_dict({"text": ["w1 w2 w3 w4 w5 w6", "w7 w8 w9 w1 w2 w3"] * 8})
    lora = peft.LoraConfig(r=2, target_modules=["q_proj", "v_proj"]) if adapter else None

    def run(kind: Any, **more: Any) -> list[float]:
        AcceleratorState._reset_state(reset_partial_state=True)
        args = trl.SFTConfig(output_dir=str(tmp_path), max_length=16, **SETTINGS)
        set_seed(0)
        given = {"args": args, "train_dataset": data, "processing_class": tokenizer()}
        return losses(kind(model=small_llama(), peft_config=lora, **given, **more))

    expected = run(trl.SFTTrainer)
    assert run(on_the_page("SFTTrainer"), cotrain=OPTIONS) == pytest.approx(expected, abs=2e-4)
    assert len(expected) == 4


def test_dpo_with_the_loss_of_the_page_and_log_probabilities_taken_beforehand(
    tmp_path: Path,
) -> None:
    trl, datasets = module("trl"), module("datasets")
    pairs = {"prompt": ["w1 w2"] * 8, "chosen": ["w3 w4 w5"] * 8, "rejected": ["w6 w7"] * 8}

    def run(kind: Any, **more: Any) -> list[float]:
        AcceleratorState._reset_state(reset_partial_state=True)
        settings = {**SETTINGS, "precompute_ref_log_probs": True}
        args = trl.DPOConfig(output_dir=str(tmp_path), max_length=16, **settings)
        set_seed(0)
        data = datasets.Dataset.from_dict(pairs)
        given = {"args": args, "train_dataset": data, "processing_class": tokenizer()}
        return losses(kind(model=small_llama(), **given, **more))

    expected = run(trl.DPOTrainer)
    assert run(on_the_page("DPOTrainer"), cotrain=OPTIONS) == pytest.approx(expected, abs=2e-4)
    assert expected[-1] < expected[0]


def test_grpo_with_the_loss_of_the_page_trains_on_completions_made_beforehand(
    tmp_path: Path,
) -> None:
    trl, datasets = module("trl"), module("datasets")

    def short(completions: list[str], **_: Any) -> list[float]:
        return [-float(len(text.split())) for text in completions]

    def run(kind: Any, **more: Any) -> list[float]:
        AcceleratorState._reset_state(reset_partial_state=True)
        settings = {**SETTINGS, "per_device_train_batch_size": 4, "num_generations": 4}
        settings |= {"max_completion_length": 6, "gradient_accumulation_steps": 2}
        args = trl.GRPOConfig(output_dir=str(tmp_path), **settings)
        set_seed(0)
        data = datasets.Dataset.from_dict({"prompt": ["w1 w2", "w3 w4"] * 8})
        given = {"args": args, "train_dataset": data, "processing_class": tokenizer()}
        trainer = kind(model=small_llama(), reward_funcs=short, **given, **more)
        trainer.train()
        return [float(p.detach().sum()) for p in trainer.model.parameters()]

    expected = run(trl.GRPOTrainer)
    assert run(on_the_page("GRPOTrainer"), cotrain=OPTIONS) == pytest.approx(expected, abs=2e-3)


TEXTS = {"text": ["w1 w2 w3 w4 w5 w6", "w7 w8 w9 w1 w2 w3"] * 8}
PAIRS = {"prompt": ["w1 w2"] * 8, "chosen": ["w3 w4 w5"] * 8, "rejected": ["w6 w7"] * 8}
PROMPTS = {"prompt": ["w1 w2", "w3 w4"] * 8}
# What each kind of training is given beside SETTINGS.
KINDS: dict[str, tuple[dict[str, list[str]], dict[str, Any]]] = {
    "SFT": (TEXTS, {"max_length": 16}),
    "DPO": (PAIRS, {"max_length": 16, "precompute_ref_log_probs": True}),
    "GRPO": (PROMPTS, {"per_device_train_batch_size": 4, "num_generations": 4}),
}


@pytest.mark.parametrize("kind", KINDS)
def test_a_trainer_goes_on_from_its_own_checkpoint(kind: str, tmp_path: Path) -> None:
    trl, datasets = module("trl"), module("datasets")
    data, more = KINDS[kind]
    score = {"reward_funcs": lambda completions, **_: [-float(len(c)) for c in completions]}

    def run(folder: str, **how: Any) -> list[Any]:
        AcceleratorState._reset_state(reset_partial_state=True)
        settings = {**SETTINGS, **more, "save_strategy": "steps", "save_steps": 2}
        if kind == "GRPO":
            settings["max_completion_length"] = 6
        args = getattr(trl, f"{kind}Config")(output_dir=str(tmp_path / folder), **settings)
        set_seed(0)
        given = {"args": args, "processing_class": tokenizer(), "cotrain": OPTIONS}
        given |= score if kind == "GRPO" else {}
        rows = datasets.Dataset.from_dict(data)
        ours = on_the_page(f"{kind}Trainer")
        trainer = ours(model=small_llama(), train_dataset=rows, **given)
        trainer.train(**how)
        assert trainer.state.global_step == 4
        return [p.detach() for p in trainer.model.parameters()]

    whole = run("whole")
    resumed = run("other", resume_from_checkpoint=str(tmp_path / "whole" / "checkpoint-2"))
    torch.testing.assert_close(resumed, whole, rtol=0, atol=0)


def test_tensorboard_reads_back_what_a_step_has_told(tmp_path: Path) -> None:
    import cotrain_compile

    tensorboard = module("torch.utils.tensorboard")
    reading = module("tensorboard.backend.event_processing.event_accumulator")
    model = torch.nn.Linear(8, 8)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(x: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        loss: torch.Tensor = model(x).square().mean()
        loss.backward()
        optimizer.step()
        return loss

    compiled = cotrain_compile.compile(step, quiet=True)
    for numbers in (range(2), range(2, 3)):  # a run, and one that goes on in its folder
        with tensorboard.SummaryWriter(str(tmp_path)) as writer:
            for number in numbers:
                compiled(torch.ones(4, 8))
                to_tensorboard(writer, compiled, number, tokens=32)
    told = reading.EventAccumulator(str(tmp_path)).Reload()
    scalars = cotrain_compile.scalars(compiled, 32, "cotrain/")
    assert set(told.Tags()["scalars"]) == set(scalars)
    peaks = told.Scalars("cotrain/device_peak_bytes")
    assert [event.step for event in peaks] == [0, 1, 2]
    assert peaks[-1].value == scalars["cotrain/device_peak_bytes"]

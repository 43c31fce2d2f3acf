"""Loops and models of other people's packages, each beside itself in eager.

None of the packages is in a list of ours: where one is not installed its test is skipped.
"""

from __future__ import annotations

import contextlib
import importlib.util
import io
import json
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from accelerate.state import AcceleratorState
from torch import Tensor, nn
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    Trainer,
    TrainingArguments,
    set_seed,
)

import cotrain_compile
from cotrain_compile.integrations.trackers import to_wandb
from cotrain_compile.integrations.transformers import CotrainTrainer
from tests.support.packages_beside import module
from tests.support.steps import cotrain

pytestmark = [pytest.mark.long, pytest.mark.filterwarnings("ignore")]  # theirs, of many kinds
Step = Callable[..., Any]


def as_in_eager(losses: Callable[[Callable[[Step], Step]], list[float]], **close: Any) -> None:
    """The step compiled has the losses that it has in eager, which change from step to step."""
    expected = losses(lambda step: step)
    assert losses(cotrain(policy="zero-offload")) == pytest.approx(expected, **close)
    assert len(set(expected)) == len(expected) > 2


def goes_on(losses: Callable[..., list[float]], **close: Any) -> None:
    """As in eager, and so does another model that has loaded what was saved after two steps."""
    as_in_eager(losses, **close)
    saved = io.BytesIO()
    first = losses(cotrain(policy="zero-offload"), save=saved)
    saved.seek(0)
    assert losses(cotrain(policy="zero-offload"), load=saved) == first[SAVED_AFTER:]


SAVED_AFTER = 2


def kept(number: int, save: io.BytesIO | None, *parts: Any) -> None:
    """Save the state of `parts` after so many steps, where a file is given."""
    if save is not None and number + 1 == SAVED_AFTER:
        torch.save([part.state_dict() for part in parts], save)


def loaded(load: io.BytesIO | None, *parts: Any) -> int:
    """Load what `kept` has saved, where a file is given; the number of steps it was after."""
    if load is None:
        return 0
    for part, state in zip(parts, torch.load(load, weights_only=True), strict=True):
        part.load_state_dict(state)
    return SAVED_AFTER


# Weights & Biases.


def records(path: Path) -> Iterator[Any]:
    """What a run without a network has written: LevelDB's log of protobufs, in blocks of 32 KiB."""
    kinds = module("wandb.proto.wandb_internal_pb2")
    data, at, whole = path.read_bytes(), 7, b""
    while at + 7 <= len(data):
        if (left := 32768 - at % 32768) < 7:
            at += left
            continue
        size, kind = int.from_bytes(data[at + 4 : at + 6], "little"), data[at + 6]
        if at + 7 + size > len(data):
            return
        whole += data[at + 7 : at + 7 + size]
        at += 7 + size
        if kind in (1, 4):  # whole, or the last part
            record = kinds.Record()
            record.ParseFromString(whole)
            yield record
            whole = b""


def whole_run(path: Path) -> list[Any]:
    """The records of a run that has ended: its process writes the last of them after `finish`."""
    for _ in range(600):
        found = list(records(path))
        if any(record.WhichOneof("record_type") == "exit" for record in found):
            return found
        time.sleep(0.1)
    pytest.fail(f"{path} has no end")


def test_a_run_of_wandb_without_a_network_has_what_a_step_has_told(tmp_path: Path) -> None:
    wandb = module("wandb")
    model = nn.Linear(8, 8)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(x: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss: Tensor = model(x).square().mean()
        loss.backward()
        optimizer.step()
        return loss

    compiled = cotrain_compile.compile(step, quiet=True)
    quiet = wandb.Settings(silent=True)
    run = wandb.init(mode="offline", dir=str(tmp_path), project="test", settings=quiet)
    for number in range(3):
        compiled(torch.ones(4, 8))
        to_wandb(run, compiled, number, tokens=32)
    run.finish()
    (file,) = tmp_path.rglob("*.wandb")
    told = [
        {item.key or ".".join(item.nested_key): item.value_json for item in record.history.item}
        for record in whole_run(file)
        if record.WhichOneof("record_type") == "history"
    ]
    scalars = cotrain_compile.scalars(compiled, 32, "cotrain/")
    assert [row["_step"] for row in told] == ["0", "1", "2"]
    assert {name: json.loads(told[-1][name]) for name in scalars} == pytest.approx(scalars)


# Frozen weights of 8 and 4 bits, by bitsandbytes.


class Adapter(nn.Module):
    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base = base
        self.down = nn.Parameter(torch.randn(4, base.in_features) * 0.1)
        self.up = nn.Parameter(torch.zeros(base.out_features, 4))

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.base(x) + F.linear(F.linear(x, self.down), self.up)
        return y


def quantized(weight: nn.Linear, bits: int) -> nn.Linear:
    layers = module("bitsandbytes").nn
    size = weight.in_features, weight.out_features
    found: nn.Linear
    if bits == 8:
        found = layers.Linear8bitLt(*size, has_fp16_weights=False)
    else:
        found = layers.Linear4bit(*size, quant_type="nf4", compute_dtype=torch.float32)
    found.load_state_dict(weight.state_dict())
    return found.to("cpu").requires_grad_(False)


@pytest.mark.parametrize("bits", [8, 4])
def test_adapters_over_weights_of_bitsandbytes(bits: int) -> None:
    def losses(
        compiled: Callable[[Step], Step],
        save: io.BytesIO | None = None,
        load: io.BytesIO | None = None,
    ) -> list[float]:
        torch.manual_seed(0)
        first, second = (quantized(nn.Linear(*size), bits) for size in ((64, 128), (128, 64)))
        model = nn.Sequential(Adapter(first), nn.GELU(), Adapter(second))
        trained = [p for p in model.parameters() if p.requires_grad]
        optimizer = torch.optim.AdamW(trained, lr=1e-2)

        def step(x: Tensor, y: Tensor) -> Tensor:
            optimizer.zero_grad()
            loss = F.mse_loss(model(x), y)
            loss.backward()
            nn.utils.clip_grad_norm_(trained, 0.1)
            optimizer.step()
            return loss.detach()

        run, parts = compiled(step), (nn.ParameterList(trained), optimizer)
        begin = loaded(load, *parts)
        torch.manual_seed(1)
        found = []
        for number in range(4):
            x, y = torch.randn(2, 8, 64)
            if number >= begin:
                found.append(run(x, y).item())
                kept(number, save, *parts)
        return found

    goes_on(losses, abs=1e-6)


@pytest.mark.parametrize("bits", [8, 4])
def test_qlora_in_the_trainer(bits: int, tmp_path: Path) -> None:
    module("bitsandbytes")
    peft, config = module("peft"), module("transformers").BitsAndBytesConfig
    set_seed(0)
    shape = LlamaConfig(
        vocab_size=64,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
    )
    LlamaForCausalLM(shape).save_pretrained(tmp_path)
    kind = {"bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": True}

    def losses(trainer_class: Any, **more: Any) -> list[float]:
        AcceleratorState._reset_state(reset_partial_state=True)
        chosen = config(load_in_8bit=True) if bits == 8 else config(load_in_4bit=True, **kind)
        set_seed(0)
        model: Any = AutoModelForCausalLM.from_pretrained(
            tmp_path, quantization_config=chosen, dtype=torch.float32, device_map="cpu"
        )
        model = peft.prepare_model_for_kbit_training(model, use_gradient_checkpointing=False)
        model = peft.get_peft_model(model, peft.LoraConfig(r=4, target_modules=["q_proj"]))
        torch.manual_seed(1)
        data = [{"input_ids": row, "labels": row} for row in torch.randint(64, (16, 12))]
        args = TrainingArguments(
            output_dir=str(tmp_path / "out"),
            per_device_train_batch_size=2,
            max_steps=4,
            logging_steps=1,
            learning_rate=1e-2,
            report_to="none",
            save_strategy="no",
            use_cpu=True,
        )
        trainer = trainer_class(model=model, args=args, train_dataset=data, **more)
        trainer.train()
        return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]

    expected = losses(Trainer)
    options = {"policy": "zero-offload", "quiet": True}
    assert losses(CotrainTrainer, cotrain=options) == pytest.approx(expected, abs=1e-4)
    assert len(set(expected)) == 4


# Recipes and trainers that own a loop: the body of it, called on an object with what it reads.


def recipe_of_torchtune(name: str, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A recipe as a module: it is a file beside the package."""
    path = Path(module("torchtune").__file__).parents[1] / "recipes"
    spec = importlib.util.spec_from_file_location("recipe", path / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    recipe = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "recipe", recipe)
    spec.loader.exec_module(recipe)
    return recipe


def model_of_torchtune(lora: bool) -> Any:
    llama, adapters = module("torchtune.models.llama3_2"), module("torchtune.modules.peft")
    shape = {
        "vocab_size": 64,
        "num_layers": 2,
        "num_heads": 4,
        "num_kv_heads": 2,
        "embed_dim": 32,
        "max_seq_len": 64,
        "intermediate_dim": 64,
    }
    if not lora:
        return llama.llama3_2(**shape)
    made = llama.lora_llama3_2(
        lora_attn_modules=["q_proj", "v_proj"], lora_rank=4, lora_alpha=8, **shape
    )
    adapters.set_trainable_params(made, adapters.get_adapter_params(made))
    return made


@pytest.mark.parametrize("lora", [False, True], ids=["whole", "lora"])
def test_the_loop_of_a_recipe_of_torchtune(lora: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    tune = module("torchtune.training")
    recipe = recipe_of_torchtune("lora_finetune_single_device", monkeypatch)
    loss_step = recipe.LoRAFinetuneRecipeSingleDevice._loss_step

    def losses(
        compiled: Callable[[Step], Step],
        save: io.BytesIO | None = None,
        load: io.BytesIO | None = None,
    ) -> list[float]:
        torch.manual_seed(0)
        model, loss_fn = model_of_torchtune(lora), nn.CrossEntropyLoss()
        optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
        scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 6)
        its = SimpleNamespace(
            _model=model,
            _loss_fn=loss_fn,
            activations_handling_ctx=contextlib.nullcontext(),
            ignore_labels_cache=torch.full((4, 1), loss_fn.ignore_index),
        )

        def step(batches: list[dict[str, Tensor]]) -> Tensor:
            running, tokens = torch.zeros(()), torch.zeros(())
            for batch in batches:
                count = (batch["labels"] != loss_fn.ignore_index).sum()
                tokens = tokens + count
                loss = loss_step(its, dict(batch)) * count
                running = running + loss.detach()
                loss.backward()
            tune.scale_grads(model, 1 / tokens)
            nn.utils.clip_grad_norm_(model.parameters(), max_norm=1.0)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            return running / tokens

        run, parts = compiled(step), (model, optimizer, scheduler)
        begin = loaded(load, *parts)
        torch.manual_seed(1)
        found = []
        for number in range(4):
            batches = [
                {"tokens": torch.randint(64, (4, 16)), "labels": torch.randint(64, (4, 16))}
                for _ in range(2)
            ]
            for batch in batches:
                batch["labels"][:, :3] = loss_fn.ignore_index
            if number < begin:
                continue
            found.append(run(batches).item())
            scheduler.step()
            kept(number, save, *parts)
        return found

    goes_on(losses, rel=1e-5)


def test_the_body_of_the_trainer_of_torchtitan() -> None:
    trainer = module("torchtitan.trainer").Trainer
    registry, loss = module("torchtitan.models.llama3"), module("torchtitan.components.loss")
    attention = module("torchtitan.models.common.attention").ScaledDotProductAttention
    clip = module("torchtitan.distributed.utils").clip_grad_norm_

    def losses(
        compiled: Callable[[Step], Step],
        save: io.BytesIO | None = None,
        load: io.BytesIO | None = None,
    ) -> list[float]:
        torch.manual_seed(0)
        spec = registry.model_registry("debugmodel")
        for layer in spec.model.layers:  # its own, FlexAttention, has no backward on a CPU
            layer.attention.inner_attention = attention.Config()
        model = spec.model.build()
        model.init_states()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
        its = SimpleNamespace(
            model_parts=[model],
            loss_fn=loss.CrossEntropyLoss(loss.CrossEntropyLoss.Config()),
            train_context=contextlib.nullcontext,
        )

        def step(batches: list[tuple[Tensor, Tensor]]) -> Tensor:
            optimizer.zero_grad()
            valid = torch.stack([(y != loss.IGNORE_INDEX).sum() for _, y in batches]).sum()
            total = torch.zeros(())
            for x, y in batches:
                total = total + trainer._forward_backward_body(its, x, y, valid, {}).detach()
            clip(list(model.parameters()), 1.0, foreach=True)
            optimizer.step()
            return total

        run, parts = compiled(step), (model, optimizer, scheduler)
        begin = loaded(load, *parts)
        torch.manual_seed(1)
        found = []
        for number in range(3):
            tokens = torch.randint(2048, (2, 2, 2, 32))
            if number < begin:
                continue
            found.append(run([(x, y) for x, y in tokens]).item())
            scheduler.step()
            kept(number, save, *parts)
        return found

    goes_on(losses, rel=1e-5)

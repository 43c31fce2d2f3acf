"""Training loops of frameworks: the examples of the documentation give eager's losses.

Rounding of one float32 step is 1e-5 of a loss; bfloat16 has 8 bits, and a dozen steps add up.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from accelerate.state import AcceleratorState
from torch import Tensor
from torch._dynamo.utils import counters
from torch.amp.grad_scaler import GradScaler
from transformers import Trainer, TrainerCallback, TrainingArguments, set_seed

from cotrain_compile.errors import OptionError
from cotrain_compile.integrations.transformers import CotrainCallback, CotrainTrainer

EXAMPLES = Path(__file__).parents[3] / "docs" / "examples"
OPTIONS = {"policy": "zero-offload"}
# What Accelerate asks of its imports (`find_spec`), and Fabric of tensors (`id`).
TRACED_FROM_2_13 = pytest.mark.skipif(torch.__version__ < "2.13", reason="not traced before 2.13")
FLOAT32, BFLOAT16 = 5e-5, 2e-2

pytestmark = [
    pytest.mark.filterwarnings("ignore:Dynamo detected a call to a `functools.lru_cache`"),
    pytest.mark.filterwarnings("ignore:.*pin_memory.*:UserWarning"),
]


@pytest.fixture
def example(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], ModuleType]:
    """Imports an example by name, as it does its neighbours; its model has a single layer here."""
    monkeypatch.syspath_prepend(EXAMPLES)
    text: Any = importlib.import_module("text")
    config = text.LlamaConfig
    monkeypatch.setattr(
        text, "LlamaConfig", lambda **settings: config(**{**settings, "num_hidden_layers": 1})
    )
    AcceleratorState._reset_state(reset_partial_state=True)
    return importlib.import_module


def largest_gap(losses: list[float], expected: list[float]) -> float:
    assert len(losses) == len(expected) == 12
    assert expected[-1] < 0.9 * expected[0]  # it learns
    return max(abs(a - b) for a, b in zip(losses, expected, strict=True))


@TRACED_FROM_2_13
@pytest.mark.parametrize(
    ("settings", "rounding"),
    [
        ({}, FLOAT32),
        pytest.param({"mixed_precision": "bf16"}, BFLOAT16, marks=pytest.mark.long),
    ],
)
def test_accelerate(
    settings: dict[str, str], rounding: float, example: Callable[[str], ModuleType]
) -> None:
    train = example("accelerate_loop").train
    assert largest_gap(train(OPTIONS, **settings), train(None, **settings)) < rounding
    # The learning rate, which a scheduler changes, is an input from the first trace on.
    assert counters["stats"]["unique_graphs"] == 1


@pytest.mark.parametrize(
    ("precision", "rounding"),
    [
        pytest.param("32-true", FLOAT32, marks=pytest.mark.long),
        pytest.param("bf16-mixed", BFLOAT16, marks=TRACED_FROM_2_13),
    ],
)
def test_fabric(precision: str, rounding: float, example: Callable[[str], ModuleType]) -> None:
    train = example("fabric_loop").train
    assert largest_gap(train(OPTIONS, precision), train(None, precision)) < rounding
    assert counters["stats"]["unique_graphs"] == 1


# Hugging Face's Trainer.


class EagerTrainer(Trainer):
    """Takes the same arguments, and compiles nothing."""

    def __init__(self, *args: Any, cotrain: object, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)


@pytest.mark.parametrize(
    ("settings", "rounding"),
    [({}, FLOAT32), ({"bf16": True}, BFLOAT16)],
)
@pytest.mark.long  # norms of the gradients are compared with eager's in every run
def test_trainer(
    settings: dict[str, bool],
    rounding: float,
    example: Callable[[str], ModuleType],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    module = example("hf_trainer")
    losses = module.train(str(tmp_path), OPTIONS, **settings)
    assert counters["stats"]["unique_graphs"] == 1
    monkeypatch.setattr(module, "CotrainTrainer", EagerTrainer)
    assert largest_gap(losses, module.train(str(tmp_path), {}, **settings)) < rounding


def arguments(folder: Path, **settings: Any) -> TrainingArguments:
    return TrainingArguments(
        str(folder),
        per_device_train_batch_size=4,
        max_steps=6,
        logging_steps=1,
        report_to=[],
        use_cpu=True,
        **settings,
    )


def make_trainer(
    cls: type, example: Callable[[str], ModuleType], args: TrainingArguments, **options: Any
) -> Any:
    text = example("text")
    set_seed(0)
    return cls(
        model=text.make_model(),
        args=args,
        train_dataset=text.make_dataset(),
        eval_dataset=text.make_dataset(8),
        cotrain={"policy": "zero-offload", "host_kernels": "captured", **options},
    )


def parameters(trainer: Any) -> dict[str, Tensor]:
    return {name: value.detach().clone() for name, value in trainer.model.state_dict().items()}


@pytest.mark.long
def test_the_trainer_logs_the_norm_of_the_gradients(
    example: Callable[[str], ModuleType], tmp_path: Path
) -> None:
    norms = []
    for cls in (CotrainTrainer, EagerTrainer):
        trainer = make_trainer(cls, example, arguments(tmp_path, max_grad_norm=0.5))
        trainer.train()
        norms.append([e["grad_norm"] for e in trainer.state.log_history if "grad_norm" in e])
    assert len(norms[0]) == 6
    assert norms[0] == pytest.approx(norms[1], rel=1e-4)


def test_a_trainer_resumes_from_its_own_checkpoint_and_evaluates_between_steps(
    example: Callable[[str], ModuleType], tmp_path: Path
) -> None:
    settings = arguments(
        tmp_path,
        optim="adagrad",  # a state for each parameter, and few ops
        max_grad_norm=0.0,  # clips nothing, so no norm is computed
        save_steps=3,
        eval_strategy="steps",
        eval_steps=2,
        lr_scheduler_type="constant",
    )
    whole = make_trainer(CotrainTrainer, example, settings)
    whole.train()
    assert sum("eval_loss" in entry for entry in whole.state.log_history) == 3
    assert not any("grad_norm" in entry for entry in whole.state.log_history)
    resumed = make_trainer(CotrainTrainer, example, settings)
    resumed.add_callback(reported := Reported())
    resumed.add_callback(CotrainCallback(tokens=4 * 16))
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-3"))
    assert resumed.state.global_step == 6
    torch.testing.assert_close(parameters(resumed), parameters(whole), rtol=0, atol=0)
    kept = [entry for entry in resumed.state.log_history if "loss" in entry][-3:]
    for entry in (*reported.losses, *kept):
        tokens_s = entry["cotrain/measured_s"] * entry["cotrain/tokens_per_s"]
        assert tokens_s == pytest.approx(4 * 16)
    assert len(reported.losses) == 3
    assert not any("cotrain/measured_s" in entry for entry in whole.state.log_history)


class Reported(TrainerCallback):
    """What a tracker such as TensorBoard's gets with each loss."""

    def __init__(self) -> None:
        self.losses: list[dict[str, float]] = []

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **rest: Any) -> None:
        self.losses += [dict(logs)] if "loss" in logs else []


def test_where_the_step_runs_in_eager_it_still_updates_once(
    example: Callable[[str], ModuleType], tmp_path: Path
) -> None:
    class Printing(CotrainTrainer):
        def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
            print("a print breaks the graph")
            return super().compute_loss(*args, **kwargs)

    printing = make_trainer(Printing, example, arguments(tmp_path), on_break="warn")
    with pytest.warns(UserWarning, match="the step runs in eager"):
        printing.train()
    eager = make_trainer(EagerTrainer, example, arguments(tmp_path))
    eager.train()
    torch.testing.assert_close(parameters(printing), parameters(eager))


def mean_of_batch(trainer: Any, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
    """A loss that knows nothing of the other micro-batches: `Trainer` divides it."""
    return model(**inputs).loss


@pytest.mark.long
@pytest.mark.parametrize("is_scaled", [True, False])
def test_accumulated_micro_batches_are_one_step(
    is_scaled: bool, example: Callable[[str], ModuleType], tmp_path: Path
) -> None:
    """Six batches an epoch: a step has four of them, the last one two."""
    scaling = {} if is_scaled else {"compute_loss": mean_of_batch, "loss_is_scaled_for_ga": False}
    settings = arguments(tmp_path, gradient_accumulation_steps=4)
    trainers = []
    for base in (CotrainTrainer, EagerTrainer):
        trainer = make_trainer(type("Scaled", (base,), scaling), example, settings)
        trainer.train()
        trainers.append(trainer)
    placed, eager = (
        [(entry["loss"], entry["grad_norm"]) for entry in trainer.state.log_history[:-1]]
        for trainer in trainers
    )
    assert len(placed) == 6
    for found, expected in zip(placed, eager, strict=True):
        assert found == pytest.approx(expected, rel=1e-4)


class InFloat16:
    """`fp16=True`, which Accelerate refuses on the CPU; the first update is skipped."""

    def create_accelerator_and_postprocess(self: Any) -> None:
        AcceleratorState._reset_state(reset_partial_state=True)
        super().create_accelerator_and_postprocess()  # type: ignore[misc]
        self.accelerator.native_amp = True
        self.accelerator.state._mixed_precision = "fp16"
        self.accelerator.scaler = GradScaler(
            "cpu", init_scale=2.0**127, backoff_factor=2.0**-117, growth_interval=3
        )

    def log(self: Any, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        super().log({**logs, "scale": self.accelerator.scaler.get_scale()}, *args, **kwargs)  # type: ignore[misc]


@pytest.mark.long  # a scaler that skips is every run's in `test_scaling`
@pytest.mark.parametrize(
    ("optim", "max_grad_norm"), [("adamw_torch", 0.0), ("adamw_torch_fused", 1.0)]
)
def test_a_trainer_in_float16_skips_as_in_eager(
    optim: str, max_grad_norm: float, example: Callable[[str], ModuleType], tmp_path: Path
) -> None:
    settings = arguments(
        tmp_path, optim=optim, max_grad_norm=max_grad_norm, gradient_accumulation_steps=2
    )
    trainers = []
    for base in (CotrainTrainer, EagerTrainer):
        trainer = make_trainer(type("Scaled", (InFloat16, base), {}), example, settings)
        start = parameters(trainer)
        trainer.train()
        trainers.append(trainer)
    ours, eager = trainers
    for key in ("scale", "learning_rate", "loss"):
        found, expected = ([e[key] for e in t.state.log_history[:-1]] for t in trainers)
        assert found == pytest.approx(expected, rel=1e-3), key
    scales = [entry["scale"] for entry in ours.state.log_history[:-1]]
    assert scales[0] == 2.0**10
    assert len(set(scales)) > 1
    torch.testing.assert_close(parameters(ours), parameters(eager), rtol=1e-3, atol=1e-4)
    moved = [(value - start[name]).abs().max() for name, value in parameters(ours).items()]
    assert max(moved) > 1e-4


def test_several_devices_are_refused_at_once(
    example: Callable[[str], ModuleType], tmp_path: Path
) -> None:
    settings = arguments(tmp_path)
    settings._n_gpu = 2
    with pytest.raises(OptionError, match="more than one device in a process; start"):
        make_trainer(CotrainTrainer, example, settings)


def test_a_model_that_the_trainer_compiles_is_refused_at_once(
    example: Callable[[str], ModuleType], tmp_path: Path
) -> None:
    with pytest.raises(OptionError, match="the Trainer's torch_compile"):
        make_trainer(CotrainTrainer, example, arguments(tmp_path, torch_compile=True))

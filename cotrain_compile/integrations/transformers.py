"""Hugging Face `Trainer`, its step compiled as a whole.

`Trainer` runs forward and backward in `training_step`, and clips and updates later, in its loop.
Here `training_step` does all of it in one compiled function, on all micro-batches of the step. The
loop then finds no gradients, so its own clipping and `optimizer.step()` have nothing to do; the
norm that it logs is the step's. With float16 the step scales its loss too, and Accelerate's wrapper
of the optimizer is told what it would have found out: whether the update was skipped.

Private API used: `AcceleratedOptimizer._is_overflow` of Accelerate. Reason: schedulers ask for it.
Tried with transformers 5.23 and Accelerate 1.15.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.amp.grad_scaler import GradScaler
from transformers import (
    Trainer,
    TrainerCallback,
    TrainerControl,
    TrainerState,
    TrainingArguments,
)

from cotrain_compile.entry.compiled import newest, scalars
from cotrain_compile.errors import OptionError
from cotrain_compile.integrations.trackers import PREFIX

# Kinds of Accelerate's distributed training whose wrappers run forward, backward or update.
_OWN_THE_STEP = ("FSDP", "DEEPSPEED", "MEGATRON_LM")

Step = Callable[[list[dict[str, Any]], Tensor | None], tuple[Tensor, Tensor | None]]


class CotrainCallback(TrainerCallback):
    """Puts the `scalars` of the step into what a `CotrainTrainer` logs, as `cotrain/...`.

    So they come into `log_history` and to whatever the Trainer reports to. With `tokens` a step
    there are tokens per second and MFU among them.
    """

    def __init__(self, tokens: float | None = None) -> None:
        self.tokens = tokens

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: dict[str, float] | None = None,
        **kwargs: Any,
    ) -> None:
        """Add to the `logs` of a training step; those of an evaluation stay as they are."""
        compiled = newest()
        if compiled is not None and logs is not None and "loss" in logs:
            found = scalars(compiled, self.tokens, PREFIX)
            logs.update(found)
            state.log_history[-1].update(found)


class CotrainTrainer(Trainer):
    """`Trainer` with a compiled step: `CotrainTrainer(..., cotrain={"memory_budget": "20GiB"})`.

    `cotrain` are the options of the backend (`docs/options.md`). Another Trainer class gets the
    same by `class MyTrainer(CotrainTrainer, Seq2SeqTrainer): ...`. Raises `OptionError` for what a
    compiled step cannot do here: several devices in one process, FSDP or DeepSpeed by Accelerate,
    the Trainer's own `torch_compile`.
    """

    def __init__(self, *args: Any, cotrain: Mapping[str, Any] | None = None, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.cotrain_options = dict(cotrain or {})
        self._compiled_step: Step | None = None
        self._micro_batches: list[dict[str, Any]] = []
        self._gradient_norm: Tensor | None = None
        _refuse_what_a_step_cannot_hold(self)
        self._let_ours_come_first()

    def add_callback(self, callback: Any) -> None:
        """As in `Trainer`."""
        super().add_callback(callback)
        self._let_ours_come_first()

    def _let_ours_come_first(self) -> None:
        # What reports a log must find the scalars in it.
        self.callback_handler.callbacks.sort(key=lambda c: not isinstance(c, CotrainCallback))

    def training_step(
        self,
        model: nn.Module,
        inputs: dict[str, Any],
        num_items_in_batch: Tensor | int | None = None,
    ) -> Tensor:
        """With the last micro-batch of a step, the whole step; the loss of all of them, detached.

        With those before it, nothing yet: they wait, and add nothing to the loss.
        """
        self._micro_batches.append(self._prepare_inputs(inputs))
        if not self.accelerator.sync_gradients:
            return torch.zeros((), device=self.args.device)
        accelerated: Any = self.optimizer  # what `Trainer` got from Accelerate for its own
        scaler = self.accelerator.scaler
        if self._compiled_step is None:
            # The loop's own `step()`, which follows, finds no gradient to unscale.
            accelerated.scaler = None
            step = _whole_step(self, model, accelerated.optimizer, scaler)
            self._compiled_step = torch.compile(
                step, backend="cotrain", options=self.cotrain_options
            )
        model.train()
        items = None if num_items_in_batch is None else torch.as_tensor(num_items_in_batch)
        batches, self._micro_batches = self._micro_batches, []
        scale = scaler.get_scale() if scaler is not None else 1.0
        loss, self._gradient_norm = self._compiled_step(batches, items)
        if scaler is not None and not _steps_when_skipped(accelerated.optimizer):
            accelerated._is_overflow = scaler.get_scale() < scale
        return loss

    def create_optimizer_and_scheduler(self, num_training_steps: int) -> None:
        """As in `Trainer`; a step compiled for an optimizer before is given up."""
        self._compiled_step, self._micro_batches = None, []
        super().create_optimizer_and_scheduler(num_training_steps)

    def _clip_grad_norm(self, model: nn.Module) -> Tensor | None:
        return self._gradient_norm

    def _get_grad_norm(self, model: nn.Module, grad_norm: Any = None) -> Tensor | None:
        return self._gradient_norm


def _steps_when_skipped(optimizer: torch.optim.Optimizer) -> bool:
    """Whether `GradScaler` calls the optimizer in every step, as it does with fused ones.

    Accelerate then sees no step skipped, and the schedule goes on; here as well.
    """
    return bool(getattr(optimizer, "_step_supports_amp_scaling", False))


def _whole_step(
    trainer: CotrainTrainer,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    scaler: GradScaler | None,
) -> Step:
    largest_norm = trainer.args.max_grad_norm

    def step(batches: list[dict[str, Any]], items: Tensor | None) -> tuple[Tensor, Tensor | None]:
        share = 1 if _covers_all_micro_batches(trainer, items) else len(batches)
        losses = []
        for inputs in batches:
            with trainer.compute_loss_context_manager():
                loss: Any = trainer.compute_loss(model, inputs, num_items_in_batch=items)
            loss = loss / share
            (loss if scaler is None else scaler.scale(loss)).backward()
            losses.append(loss.detach())
        if scaler is not None:
            scaler.unscale_(optimizer)
        # A norm alone, for the log, would have all gradients wait for the last one. Of a frozen
        # quantized weight, a class of its own, Dynamo reads no gradient.
        trained = [p for p in model.parameters() if p.requires_grad]
        norm = nn.utils.clip_grad_norm_(trained, largest_norm) if largest_norm else None
        if scaler is None:
            optimizer.step()
        else:
            scaler.step(optimizer)
            scaler.update()
        # The Trainer's own step, which follows, must find nothing to do.
        optimizer.zero_grad()
        return torch.stack(losses).sum(), norm

    return step


def _covers_all_micro_batches(trainer: CotrainTrainer, items: Tensor | None) -> bool:
    """Whether a loss is a share of the step's already, by the rules of `Trainer`."""
    if trainer.loss_is_scaled_for_ga is not None:
        return bool(trainer.loss_is_scaled_for_ga)
    counts = trainer.model_accepts_loss_kwargs and items is not None
    return bool(counts or trainer.compute_loss_func is not None)


def _refuse_what_a_step_cannot_hold(trainer: CotrainTrainer) -> None:
    args, how = trainer.args, trainer.accelerator.distributed_type.name
    refused = {
        "more than one device in a process; start a process for each, by torchrun": args.n_gpu > 1,
        f"{how} of Accelerate, whose wrapper owns the step; use its default for several "
        "processes, DistributedDataParallel": how in _OWN_THE_STEP,
        "the Trainer's torch_compile; leave it out, the whole step is compiled": args.torch_compile,
    }
    for told, is_asked in refused.items():
        if is_asked:
            raise OptionError(f"{type(trainer).__name__} cannot run with {told}")

"""Torchtune: the meaning of the settings of its recipes' YAML (pytorch.org/torchtune, 0.6)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from cotrain_compile.migrate.counterparts import (
    Optimizer,
    Precision,
    Ranks,
    Reader,
    Rule,
    Training,
    Way,
    rule,
)

RULES: tuple[Rule, ...] = (
    rule(
        Way.PLAN,
        "the plan decides for each state and parameter where it rests and is updated",
        "fsdp_cpu_offload",
    ),
    rule(
        Way.STEP,
        "the optimizer in the step; what CPUOffloadOptimizer does is decided by the plan",
        "optimizer._component_",
    ),
    rule(
        Way.PLAN,
        "option `recompute` is on: the plan says what is recomputed and what is offloaded",
        "enable_activation_checkpointing",
        "enable_activation_offloading",
        "ac_mode",
        "ac_option",
    ),
    rule(
        Way.PLAN,
        "updates run as soon as their gradient is there, with clipping and accumulation, too",
        "optimizer_in_bwd",
    ),
    rule(
        Way.PLAN,
        "what is gathered twice, and when, is decided by the plan",
        "fsdp_reshard_after_forward",
    ),
    rule(Way.STEP, "`fully_shard` on the layers (docs/several_cards.md)", "custom_sharded_layers"),
    rule(
        Way.STEP,
        "torch.nn.CrossEntropyLoss in the step, which option `split` runs in parts; torchtune's "
        "own chunks break the graph",
        "loss.*",
        "loss",
    ),
    rule(Way.STEP, "arguments of the optimizer", "optimizer.*"),
    rule(Way.STEP, "any scheduler of torch; the rate is an input of the step", "lr_scheduler.*"),
    rule(Way.STEP, "clip_grad_norm_ in the step, exact with every plan", "clip_grad_norm"),
    rule(
        Way.STEP,
        "several backward() in one step, or calls that only add up",
        "gradient_accumulation_steps",
    ),
    rule(Way.STEP, "the dtype of the weights", "dtype"),
    rule(
        Way.OPTION,
        'this is the compiler: option `lowering="inductor"` is the default on a card',
        "compile",
        "compile.*",
    ),
    rule(Way.OPTION, "option `device`", "device"),
    rule(
        Way.NONE,
        "this way to share a step is not planned by this command",
        "tensor_parallel_*",
        "data_parallel_*",
        "context_parallel_*",
        "enable_async_tp",
    ),
    rule(Way.NONE, "products in float8 are not tried", "enable_fp8_training", "fp8_recipe_name"),
    rule(
        Way.YOURS,
        "the model, its data and how they are read",
        "model.*",
        "tokenizer.*",
        "dataset.*",
        "dataset_val.*",
        "shuffle",
        "seed",
        "checkpointer.*",
        "resume_from_checkpoint",
        "collate_fn",
        "packed",
        "save_adapter_weights_only",
        "enable_async_checkpointing",
        "base_model",
    ),
    rule(
        Way.YOURS,
        "the loop around the step",
        "batch_size",
        "batch_size_val",
        "epochs",
        "max_steps_per_epoch",
        "run_val_every_n_steps",
        "output_dir",
        "metric_logger.*",
        "log_*",
        "cudnn_deterministic_mode",
        "profiler.*",
        "dataloader.*",
    ),
)


# One of these is in every recipe for several cards.
_OF_RANKS = ("fsdp_cpu_offload", "fsdp_reshard_after_forward", "custom_sharded_layers")


def training(document: Mapping[str, Any]) -> Training:
    """What `document` says of the step."""
    read = Reader(document)
    return Training(
        optimizer=_optimizer(read),
        precision=Precision.WEIGHTS_BF16 if read("dtype") == "bf16" else Precision.AS_BUILT,
        micro_batches=read.count("gradient_accumulation_steps", 1),
        clip=read.number("clip_grad_norm") or None,
        offloads=read.is_on("fsdp_cpu_offload"),
        ranks=Ranks.SHARDS if any(read(key) is not None for key in _OF_RANKS) else Ranks.ONE,
    )


def _optimizer(read: Reader) -> Optimizer | None:
    """Torchtune's component and its arguments; `optimizer.optimizer` is what an offload wraps."""
    given = read.below("optimizer")
    kind = given.pop("_component_", None)
    if kind is None:
        return None
    inner = given.get("optimizer")
    if str(kind).endswith("CPUOffloadOptimizer"):
        name = str(inner or "torch.optim.AdamW")
    else:
        name = str(kind)
    dropped = ("optimizer", "offload_gradients", "fused")
    return Optimizer(name, {k: _number(v) for k, v in given.items() if k not in dropped})


def _number(value: Any) -> Any:
    """YAML reads `2e-5` as a word: a number where it is one."""
    if not isinstance(value, str):
        return value
    try:
        return float(value)
    except ValueError:
        return value

"""DeepSpeed: the meaning of the settings of its JSON (deepspeed.ai/docs/config-json, 0.17)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from cotrain_compile.migrate.counterparts import (
    Optimizer,
    Precision,
    Reader,
    Rule,
    Training,
    Way,
    rule,
)

RULES: tuple[Rule, ...] = (
    rule(
        Way.PLAN,
        "the plan decides for each state and update where it rests and runs",
        "zero_optimization.offload_optimizer.device",
    ),
    rule(
        Way.PLAN,
        "the plan decides for each parameter whether it rests on the host",
        "zero_optimization.offload_param.device",
    ),
    rule(
        Way.OPTION,
        "option `disk`: what the host has no room for rests there",
        "zero_optimization.offload_optimizer.nvme_path",
        "zero_optimization.offload_param.nvme_path",
    ),
    rule(
        Way.YOURS,
        "how the model is loaded and saved",
        "zero_optimization.*gather_16bit_weights_on_model_save",
        "zero_optimization.load_from_fp32_weights",
        "zero_optimization.elastic_checkpoint",
    ),
    rule(
        Way.PLAN,
        "pinning, buffers, pieces and overlap follow from the plan",
        "zero_optimization.offload_*",
        "zero_optimization.cpu_offload*",
        "zero_optimization.*persistence_threshold",
        "zero_optimization.*max_live_parameters",
        "zero_optimization.*max_reuse_distance",
        "zero_optimization.use_multi_rank_bucket_allreduce",
        "zero_optimization.overlap_comm",
        "zero_optimization.contiguous_gradients",
        "zero_optimization.*bucket_size",
        "zero_optimization.allgather_partitions",
        "zero_optimization.reduce_scatter",
        "zero_optimization.sub_group_size",
        "zero_optimization.round_robin_gradients",
        "zero_optimization.stage3_*",
        "zero_optimization.memory_efficient_linear",
        "aio.*",
    ),
    rule(
        Way.STEP,
        "one GPU: nothing to do; several: `fully_shard` on the layers (docs/several_cards.md)",
        "zero_optimization.stage",
    ),
    rule(
        Way.NONE,
        "exchanges are of whole numbers: nothing is quantized on the network",
        "zero_optimization.zero_quantized_*",
        "compression_training.*",
    ),
    rule(
        Way.NONE,
        "groups of ranks within groups are not planned",
        "zero_optimization.zero_hpz_partition_size",
        "zero_optimization.mics_*",
    ),
    rule(
        Way.PLAN,
        "parameters without a gradient stay as they are",
        "zero_optimization.ignore_unused_parameters",
    ),
    rule(
        Way.STEP,
        "the optimizer in plain PyTorch; updates on the host run in a fused loop of ours",
        "optimizer.*",
        "zero_force_ds_cpu_optimizer",
        "zero_allow_untested_optimizer",
    ),
    rule(Way.STEP, "any scheduler of torch; the rate is an input of the step", "scheduler.*"),
    rule(
        Way.STEP,
        "torch.autocast in the step: weights in float32 are the masters",
        "bf16.enabled",
        "bfloat16.enabled",
        "fp16.enabled",
        "fp16.auto_cast",
        "torch_autocast.*",
    ),
    rule(Way.STEP, "arguments of torch.amp.GradScaler", "fp16.*"),
    rule(Way.NONE, "gradients add up in the dtype of their parameter", "bf16.*", "data_types.*"),
    rule(Way.STEP, "clip_grad_norm_ in the step, exact with every plan", "gradient_clipping"),
    rule(
        Way.STEP,
        "several backward() in one step, or calls that only add up",
        "gradient_accumulation_steps",
    ),
    rule(
        Way.YOURS,
        "the batch that you give to the step",
        "train_batch_size",
        "train_micro_batch_size_per_gpu",
    ),
    rule(
        Way.NONE,
        "ranks add gradients as DDP does, in their own dtype",
        "prescale_gradients",
        "gradient_predivide_factor",
        "communication_data_type",
        "sparse_gradients",
    ),
    rule(
        Way.PLAN,
        "option `recompute` is on: the plan says what is recomputed and what is offloaded",
        "activation_checkpointing.*",
    ),
    rule(
        Way.YOURS,
        "what logs, profiles and samples stays outside of the step",
        "steps_per_print",
        "wall_clock_breakdown",
        "dump_state",
        "memory_breakdown",
        "tensorboard.*",
        "wandb.*",
        "csv_monitor.*",
        "comet.*",
        "flops_profiler.*",
        "comms_logger.*",
        "data_efficiency.*",
        "checkpoint.*",
    ),
    rule(
        Way.NONE,
        "every update is whole and exact: none is put off or left out",
        "zero_optimization.zenflow.*",
    ),
    rule(
        Way.NONE,
        "not part of a step here",
        "sequence_parallel_size",
        "hybrid_engine.*",
        "elasticity.*",
        "autotuning.*",
        "sparse_attention.*",
        "compile.*",
        "progressive_layer_drop.*",
        "curriculum_learning.*",
        "tensor_parallel.*",
        "pipeline.*",
    ),
)

# DeepSpeed's Adam decays weights as AdamW does, unless `adam_w_mode` is false.
_OPTIMIZERS = {
    "adam": "AdamW",
    "adamw": "AdamW",
    "sgd": "SGD",
    "adagrad": "Adagrad",
    "muon": "Muon",
}
_ARGUMENTS = ("lr", "betas", "eps", "weight_decay", "momentum")


def training(document: Mapping[str, Any]) -> Training:
    """What `document` says of the step; "auto", which a Trainer fills in, says nothing."""
    read = Reader(document)
    zero = "zero_optimization"
    return Training(
        optimizer=_optimizer(read),
        precision=_precision(read),
        micro_batches=read.count("gradient_accumulation_steps", 1),
        clip=read.number("gradient_clipping") or None,
        offloads=any(read.is_on(f"{zero}.offload_{kind}.device") for kind in ("optimizer", "param"))
        or read.is_on(f"{zero}.cpu_offload"),
        disk=read.folder_of_a_drive(zero, ".device", ".nvme_path"),
    )


def _optimizer(read: Reader) -> Optimizer | None:
    kind = str(read("optimizer.type", ""))
    if not kind:
        return None
    given = read.below("optimizer.params")
    name = _OPTIMIZERS.get(kind.lower(), kind)
    if name == "AdamW" and given.get("adam_w_mode") is False:
        name = "Adam"
    known = {key: given[key] for key in _ARGUMENTS if key in given and given[key] != "auto"}
    return Optimizer(f"torch.optim.{name}" if kind.lower() in _OPTIMIZERS else kind, known)


def _precision(read: Reader) -> Precision:
    if read.is_on("bf16.enabled") or read.is_on("bfloat16.enabled"):
        return Precision.AUTOCAST_BF16
    if read.is_on("torch_autocast.enabled"):
        half = read("torch_autocast.dtype") == "float16"
        return Precision.AUTOCAST_FP16 if half else Precision.AUTOCAST_BF16
    return Precision.AUTOCAST_FP16 if read.is_on("fp16.enabled") else Precision.AS_BUILT

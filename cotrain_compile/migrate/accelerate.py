"""Accelerate: the meaning of what `accelerate config` writes (accelerate 1.10)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from cotrain_compile.migrate.counterparts import (
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
        "fsdp_config.fsdp_offload_params",
        "deepspeed_config.offload_optimizer_device",
        "deepspeed_config.offload_param_device",
    ),
    rule(
        Way.OPTION,
        "option `disk`: what the host has no room for rests there",
        "deepspeed_config.offload_optimizer_nvme_path",
        "deepspeed_config.offload_param_nvme_path",
    ),
    rule(
        Way.STEP,
        "`fully_shard` on the layers, by hand or as Accelerate does it (docs/several_cards.md)",
        "fsdp_config.fsdp_version",
        "fsdp_config.fsdp_auto_wrap_policy",
        "fsdp_config.fsdp_transformer_layer_cls_to_wrap",
        "fsdp_config.fsdp_min_num_params",
        "fsdp_config.fsdp_use_orig_params",
        "fsdp_config.fsdp_sync_module_states",
        "deepspeed_config.zero_stage",
    ),
    rule(
        Way.STEP,
        "`fully_shard`, gathered as often as the plan says; HYBRID_SHARD: with a mesh of two "
        "dimensions; NO_SHARD: DDP (docs/several_cards.md)",
        "fsdp_config.fsdp_sharding_strategy",
    ),
    rule(
        Way.PLAN,
        "what is gathered twice, and when, is decided by the plan",
        "fsdp_config.fsdp_reshard_after_forward",
        "fsdp_config.fsdp_backward_prefetch",
        "fsdp_config.fsdp_backward_prefetch_policy",
        "fsdp_config.fsdp_forward_prefetch",
    ),
    rule(
        Way.PLAN,
        "option `recompute` is on: the plan says what is recomputed and what is offloaded",
        "fsdp_config.fsdp_activation_checkpointing",
    ),
    rule(
        Way.YOURS,
        "how the model is loaded and saved",
        "fsdp_config.fsdp_state_dict_type",
        "fsdp_config.fsdp_cpu_ram_efficient_loading",
        "deepspeed_config.zero3_init_flag",
        "deepspeed_config.zero3_save_16bit_model",
    ),
    rule(
        Way.STEP,
        "what that file says: run this command on it, too",
        "deepspeed_config.deepspeed_config_file",
    ),
    rule(
        Way.STEP,
        "several backward() in one step, or calls that only add up",
        "deepspeed_config.gradient_accumulation_steps",
        "gradient_accumulation_steps",
    ),
    rule(
        Way.STEP,
        "clip_grad_norm_ in the step, exact with every plan",
        "deepspeed_config.gradient_clipping",
    ),
    rule(Way.STEP, "torch.autocast in the step, where it is not `no`", "mixed_precision"),
    rule(Way.STEP, "DDP or `fully_shard` in code, started by torchrun", "distributed_type"),
    rule(
        Way.OPTION,
        'this is the compiler: torch.compile(step, backend="cotrain"), not a backend beside',
        "dynamo_config.*",
    ),
    rule(Way.OPTION, "option `host_cores`", "enable_cpu_affinity"),
    rule(
        Way.NONE,
        "this way to share a model is not planned by this command",
        "megatron_lm_config.*",
        "parallelism_config.*",
        "tp_config.*",
        "mpirun_config.*",
        "ipex_config.*",
    ),
    rule(Way.NONE, "products in float8 are not tried", "fp8_config.*"),
    rule(
        Way.YOURS,
        "how processes are started",
        "compute_environment",
        "num_processes",
        "num_machines",
        "machine_rank",
        "main_process_*",
        "main_training_function",
        "rdzv_backend",
        "same_network",
        "gpu_ids",
        "use_cpu",
        "debug",
        "tpu_*",
        "downcast_bf16",
        "deepspeed_config.deepspeed_hostfile",
        "deepspeed_config.deepspeed_multinode_launcher",
        "deepspeed_config.deepspeed_*clusion_filter",
        "commands",
        "command_file",
    ),
)

_PRECISIONS = {"bf16": Precision.AUTOCAST_BF16, "fp16": Precision.AUTOCAST_FP16}


def training(document: Mapping[str, Any]) -> Training:
    """What `document` says of the step; the optimizer is in the user's code."""
    read = Reader(document)
    deepspeed = "deepspeed_config"
    accumulation = "gradient_accumulation_steps"
    return Training(
        precision=_PRECISIONS.get(str(read("mixed_precision")), Precision.AS_BUILT),
        micro_batches=read.count(f"{deepspeed}.{accumulation}", read.count(accumulation, 1)),
        clip=read.number(f"{deepspeed}.gradient_clipping") or None,
        offloads=read.is_on("fsdp_config.fsdp_offload_params")
        or any(read.is_on(f"{deepspeed}.offload_{k}_device") for k in ("optimizer", "param")),
        ranks=_ranks(read),
        disk=read.folder_of_a_drive(deepspeed, "_device", "_nvme_path"),
    )


def _ranks(read: Reader) -> Ranks:
    """NO_SHARD, the third of FSDP's strategies, and ZeRO's stage 0 leave each rank the model."""
    if read.count("num_processes", 1) == 1:
        return Ranks.ONE
    whole = {
        "FSDP": str(read("fsdp_config.fsdp_sharding_strategy")) in ("NO_SHARD", "3"),
        "DEEPSPEED": read("deepspeed_config.zero_stage") == 0,
    }
    shares = whole.get(str(read("distributed_type"))) is False
    return Ranks.SHARDS if shares else Ranks.REPLICAS

"""Axolotl: the meaning of the settings of its YAML (docs.axolotl.ai, 0.12)."""

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
        Way.STEP,
        "read that DeepSpeed JSON with this command, too; its offload is decided by the plan",
        "deepspeed",
    ),
    rule(
        Way.PLAN,
        "the plan decides for each state and parameter where it rests and is updated",
        "fsdp_config.*offload_params",
    ),
    rule(
        Way.STEP,
        "`fully_shard` on the layers (docs/several_cards.md); prefetches follow from the plan",
        "fsdp",
        "fsdp_version",
        "fsdp_config.*",
    ),
    rule(
        Way.PLAN,
        "option `recompute` is on: the plan says what is recomputed and what is offloaded",
        "gradient_checkpointing*",
        "activation_offloading",
    ),
    rule(
        Way.PLAN,
        "the loss is part of the step, and what it holds at once is planned",
        "plugins",
        "liger_*",
        "cut_cross_entropy",
        "chunked_cross_entropy",
        "tiled_mlp*",
    ),
    rule(
        Way.STEP,
        "torch's own attention, or FlashAttention's package, in the model",
        "flash_attention",
        "flash_attn_*",
        "sdp_attention",
        "xformers_attention",
        "flex_attention",
        "eager_attention",
    ),
    rule(Way.STEP, "the optimizer in the step", "optimizer", "optim_*", "learning_rate"),
    rule(Way.STEP, "arguments of the optimizer", "weight_decay", "adam_*"),
    rule(Way.STEP, "groups of the optimizer, each with a rate", "embedding_lr*", "loraplus_*"),
    rule(Way.STEP, "requires_grad_ on parameters, before the step", "unfrozen_parameters"),
    rule(
        Way.STEP,
        "the loss of that trainer, written down (docs/frameworks.md#trl-and-peft)",
        "rl",
        "rl_*",
        "dpo_*",
        "orpo_*",
        "kto_*",
        "simpo_*",
        "trl.*",
    ),
    rule(
        Way.STEP,
        "any scheduler of torch; the rate is an input of the step",
        "lr_scheduler*",
        "warmup_*",
        "cosine_*",
    ),
    rule(Way.STEP, "clip_grad_norm_ in the step, exact with every plan", "max_grad_norm"),
    rule(
        Way.STEP,
        "several backward() in one step, or calls that only add up",
        "gradient_accumulation_steps",
    ),
    rule(Way.STEP, "the dtype of the weights, or torch.autocast", "bf16", "fp16", "bfloat16"),
    rule(Way.STEP, "torch.set_float32_matmul_precision, obeyed", "tf32"),
    rule(
        Way.STEP,
        "PEFT's adapter on the model, in the step as it is (docs/tasks/lora.md)",
        "adapter",
        "lora_*",
        "peft_*",
        "lora_target_*",
    ),
    rule(
        Way.STEP,
        "how the model is loaded, before the step; bitsandbytes' frozen weights are captured",
        "load_in_4bit",
        "bnb_*",
    ),
    rule(Way.STEP, "how the model is loaded, before the step", "load_in_8bit", "gptq*"),
    rule(
        Way.NONE,
        "this way to share a step is not planned by this command",
        "sequence_parallel_degree",
        "context_parallel_*",
        "tensor_parallel_*",
        "dp_*",
        "unsloth_*",
    ),
    rule(Way.NONE, "this is the compiler: torch.compile of the whole step", "torch_compile*"),
    rule(
        Way.YOURS,
        "the model, its data and how they are read",
        "base_model*",
        "model_type",
        "tokenizer*",
        "trust_remote_code",
        "datasets",
        "test_datasets",
        "dataset_*",
        "val_set_size",
        "sequence_len",
        "sample_packing*",
        "eval_sample_packing",
        "pad_to_sequence_len",
        "train_on_inputs",
        "group_by_length",
        "chat_template*",
        "special_tokens*",
        "tokens",
        "shuffle_*",
        "seed",
        "strict",
        "dataloader_*",
        "remove_unused_columns",
        "is_*_derived_model",
        "overrides_of_model_config*",
        "resize_token_embeddings*",
    ),
    rule(
        Way.YOURS,
        "the loop around the step",
        "micro_batch_size",
        "eval_batch_size",
        "num_epochs",
        "max_steps",
        "output_dir",
        "logging_*",
        "eval*",
        "save*",
        "wandb_*",
        "mlflow_*",
        "comet_*",
        "use_tensorboard",
        "resume_from_checkpoint",
        "auto_resume*",
        "early_stopping*",
        "hub_*",
        "debug",
        "local_rank",
        "ddp_*",
        "report_to",
        "neftune_*",
    ),
)

# Names of transformers' TrainingArguments.optim.
_OPTIMIZERS = {
    "adamw_torch": "torch.optim.AdamW",
    "adamw_torch_fused": "torch.optim.AdamW",
    "adamw_hf": "torch.optim.AdamW",
    "sgd": "torch.optim.SGD",
    "adagrad": "torch.optim.Adagrad",
    "rmsprop": "torch.optim.RMSprop",
    "adamw_bnb_8bit": "bitsandbytes.optim.AdamW8bit",
    "adamw_8bit": "bitsandbytes.optim.AdamW8bit",
    "paged_adamw_8bit": "bitsandbytes.optim.PagedAdamW8bit",
    "paged_adamw_32bit": "bitsandbytes.optim.PagedAdamW",
    "lion_8bit": "bitsandbytes.optim.Lion8bit",
    "adamw_torch_8bit": "torchao.optim.AdamW8bit",
    "adamw_torch_4bit": "torchao.optim.AdamW4bit",
    "ao_adamw_8bit": "torchao.optim.AdamW8bit",
    "ao_adamw_4bit": "torchao.optim.AdamW4bit",
    "ao_adamw_fp8": "torchao.optim.AdamWFp8",
}


def training(document: Mapping[str, Any]) -> Training:
    """What `document` says of the step."""
    read = Reader(document)
    fsdp = read.below("fsdp_config")
    return Training(
        optimizer=_optimizer(read),
        precision=_precision(read),
        micro_batches=read.count("gradient_accumulation_steps", 1),
        clip=read.number("max_grad_norm") or None,
        offloads=any(key.endswith("offload_params") and value for key, value in fsdp.items())
        or read.is_on("deepspeed"),
        ranks=Ranks.SHARDS if fsdp or read.is_on("fsdp") else Ranks.ONE,
    )


def _optimizer(read: Reader) -> Optimizer | None:
    kind = str(read("optimizer", ""))
    if not kind:
        return None
    numbers = {"lr": read.number("learning_rate"), "eps": read.number("adam_epsilon")}
    betas = (read.number("adam_beta1"), read.number("adam_beta2"))
    arguments: dict[str, Any] = {key: value for key, value in numbers.items() if value is not None}
    if None not in betas:
        arguments["betas"] = betas
    if (decay := read.number("weight_decay")) is not None:
        arguments["weight_decay"] = decay
    return Optimizer(_OPTIMIZERS.get(kind, kind), arguments)


def _precision(read: Reader) -> Precision:
    """`bf16: auto` is bfloat16 on every card that has it."""
    if read.is_on("bf16") or read.is_on("bfloat16") or str(read("bf16")) == "auto":
        return Precision.AUTOCAST_BF16
    return Precision.AUTOCAST_FP16 if read.is_on("fp16") else Precision.AS_BUILT

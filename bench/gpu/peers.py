"""What others do with a model too large for the card: the same training step, by their own means.

Each peer trains the GPT of `bench.gpu.model` with AdamW, bfloat16 compute and clipping, set up as
its documentation says, and gives a function that runs one step. A peer that is not installed, or
cannot run here, says why; none is needed to use the package.

Private torch API used: `torch._functorch.config.enable_activation_offloading` and the key
"should_offload" of a node's meta. Reason: the activation offloading of compiled graphs has no
public switch yet. Tried on torch 2.11.0, 2.13.0 and 2.15.0.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bench.gpu.model import Size, Training

Step = Callable[[Tensor, Tensor], Any]


@dataclass(frozen=True)
class Peer:
    """A way to train: `needs` is a package beyond torch; `cpu` whether it runs without a card.

    `session` makes the step of a model of the given size on a device, and cleans up behind it.
    """

    name: str
    session: Callable[[Size, str], contextlib.AbstractContextManager[Step]]
    needs: str | None = None
    cpu: bool = True
    remark: str = ""

    def missing(self, device: str) -> str | None:
        """Why it cannot run on `device`; None if it can."""
        if self.needs is not None and importlib.util.find_spec(self.needs) is None:
            return f"{self.needs} is not installed"
        return "needs a card" if device == "cpu" and not self.cpu else None


# Everything stays on the device.


@contextlib.contextmanager
def eager(size: Size, device: str) -> Iterator[Step]:
    """PyTorch without compiling."""
    yield Training(size, device).step


@contextlib.contextmanager
def stock_compile(size: Size, device: str) -> Iterator[Step]:
    """A compiled model, as users compile it."""
    training = Training(size, device)
    training.model.compile()
    yield training.step


# Activations leave the device.


@contextlib.contextmanager
def save_on_cpu(size: Size, device: str) -> Iterator[Step]:
    """All that autograd saves goes to pinned memory and back, each when it is saved and used."""
    training = Training(size, device)
    forward = training.model.forward

    def saving(tokens: Tensor) -> Tensor:
        with torch.autograd.graph.save_on_cpu(pin_memory=device == "cuda"):
            logits: Tensor = forward(tokens)
        return logits

    training.model.forward = saving
    yield training.step


@contextlib.contextmanager
def compiled_offloading(size: Size, device: str) -> Iterator[Step]:
    """`torch.compile` with its own activation offloading, for all that it saves."""
    import torch._functorch.config as functorch
    import torch._inductor.config as inductor

    training = Training(size, device)
    training.model.compile()
    with (
        functorch.patch(
            enable_activation_offloading=True, activation_offload_separate_stream=device == "cuda"
        ),
        inductor.patch(joint_custom_pre_pass=_mark_all),
    ):
        yield training.step


def _mark_all(graph: torch.fx.Graph) -> None:
    for node in graph.nodes:
        node.meta["should_offload"] = True


# Parameters and states leave the device.


@contextlib.contextmanager
def fsdp2_offload(size: Size, device: str) -> Iterator[Step]:
    """FSDP2 on a mesh of one: parameters, gradients and states on the host, updates there."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard

    with _one_process(device):
        mesh = init_device_mesh(device, (1,))
        training = Training(size, device, built_on="cpu")
        settings: dict[str, Any] = {
            "mesh": mesh,
            "offload_policy": CPUOffloadPolicy(pin_memory=device == "cuda"),
            "mp_policy": MixedPrecisionPolicy(param_dtype=torch.bfloat16),
        }
        model: Any = training.model
        for block in model.blocks:
            fully_shard(block, **settings)
        fully_shard(model, **settings)
        # The parameters are other ones now; each group of them is updated by one fused call.
        training.optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
        yield lambda *batch: _plain_step(training, *batch)


@contextlib.contextmanager
def _one_process(device: str) -> Iterator[None]:
    """A process group of this process alone."""
    import torch.distributed as dist

    backend = "cpu:gloo,cuda:nccl" if device == "cuda" else "gloo"
    with tempfile.TemporaryDirectory() as folder:
        dist.init_process_group(backend, f"file://{folder}/store", rank=0, world_size=1)
        try:
            yield
        finally:
            dist.destroy_process_group()


@contextlib.contextmanager
def torchao_offload(size: Size, device: str) -> Iterator[Step]:
    """torchao's optimizer: states on the host, each gradient sent when it is there."""
    from torchao.optim import CPUOffloadOptimizer

    training = Training(size, device)
    optimizer: Any = CPUOffloadOptimizer(
        training.model.parameters(), torch.optim.AdamW, fused=True, lr=1e-4
    )
    training.optimizer = optimizer
    yield lambda *batch: _plain_step(training, *batch, clip=False)


@contextlib.contextmanager
def zero_offload(size: Size, device: str) -> Iterator[Step]:
    """DeepSpeed's ZeRO stage 2 with optimizer states and updates on the host."""
    import deepspeed

    single = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}
    os.environ.update({**single, "MASTER_PORT": "29511"})
    training = Training(size, device)
    engine, *_ = deepspeed.initialize(
        model=training.model,
        model_parameters=list(training.model.parameters()),
        config={
            "train_micro_batch_size_per_gpu": size.rows,
            "bf16": {"enabled": True},
            "gradient_clipping": 1.0,
            "zero_optimization": {
                "stage": 2,
                "offload_optimizer": {"device": "cpu", "pin_memory": True},
                "overlap_comm": True,
            },
            "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}},
        },
    )

    def step(tokens: Tensor, following: Tensor) -> None:
        loss = _loss(engine, tokens, following)
        engine.backward(loss)
        engine.step()

    try:
        yield step
    finally:
        engine.destroy()


def _plain_step(
    training: Training, tokens: Tensor, following: Tensor, *, clip: bool = True
) -> Tensor:
    """`Training.step` for a model that computes in bfloat16 by itself or under autocast."""
    training.optimizer.zero_grad()
    with torch.autocast(training.device, dtype=torch.bfloat16):
        loss = _loss(training.model, tokens, following)
    loss.backward()
    if clip:
        nn.utils.clip_grad_norm_(training.model.parameters(), 1.0)
    training.optimizer.step()
    return loss.detach()


def _loss(model: nn.Module, tokens: Tensor, following: Tensor) -> Tensor:
    logits = model(tokens).flatten(0, 1)
    return F.cross_entropy(logits.float(), following.flatten())


PEERS = (
    Peer("eager", eager),
    Peer("torch.compile", stock_compile),
    Peer("save_on_cpu", save_on_cpu, remark="activations only"),
    Peer("torch.compile, activations offloaded", compiled_offloading, remark="activations only"),
    Peer("FSDP2 CPUOffloadPolicy", fsdp2_offload, remark="bfloat16 without autocast"),
    Peer(
        "torchao CPUOffloadOptimizer",
        torchao_offload,
        needs="torchao",
        cpu=False,
        remark="does not clip",
    ),
    Peer("DeepSpeed ZeRO-Offload", zero_offload, needs="deepspeed", cpu=False),
)

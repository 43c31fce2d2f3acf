"""Two stages, each on two ranks that have other samples, and one process that has all of them."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import cotrain_compile
from cotrain_compile.cluster.model.layout import StagePlan
from cotrain_compile.errors import CotrainError
from tests.support.failing_stages import short_of_memory, told
from tests.support.pipelines import STEPS, loss_of, made, pictures

REPLICAS, MICRO_BATCHES, MICRO_BATCH = 2, 2, 2
MAX_NORM = 0.2
PLAN = StagePlan("1F1B", ("layers.2",), MICRO_BATCHES, MICRO_BATCH)
SWAPPED = StagePlan(
    "LoopedBFS", ("layers.1", "layers.2", "layers.3"), MICRO_BATCHES, MICRO_BATCH, swapped=True
)


@dataclass(frozen=True)
class Trained:
    """Losses of all micro-batches by step, norms by step, and what a rank has in the end."""

    losses: list[list[float]]
    norms: list[float]
    state: dict[str, torch.Tensor]
    overrun: str = ""
    replica: int = 0


def trained(rank: int, plan: StagePlan, fails: bool) -> Trained:
    """Steps of this rank's stages; the first is one that rank 1 has no memory for, if it fails."""
    mesh = grid()
    model = made("resnet")
    if mesh.get_local_rank("replicate"):
        with torch.no_grad():
            for param in model.parameters():
                param.add_(1.0)  # it begins as the first replica all the same
    samples, target = share(0, mesh.get_local_rank("replicate"))
    pipe = cotrain_compile.pipeline(
        model, plan, loss_of, (samples,), target, options={"quiet": True}, mesh=mesh
    )
    overrun = ""
    if fails:
        with short_of_memory(pipe.stages[0].turns.functions[0], rank):
            overrun = told(lambda: pipe.step(samples, target=target))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    update = pipe.compiled_update(optimizer)
    losses, norms = [], []
    for step in range(STEPS):
        samples, target = share(step, pipe.replica)
        found: list[torch.Tensor] = []
        pipe.step(samples, target=target, losses=found)
        norms.append(float(pipe.clip_grad_norm(MAX_NORM)))
        update()
        losses.append([float(loss) for loss in found])
    return Trained(losses, norms, dict(model.state_dict()), overrun, pipe.replica)


def grid() -> DeviceMesh:
    return init_device_mesh("cpu", (2, REPLICAS), mesh_dim_names=("pipeline", "replicate"))


def share(step: int, replica: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The samples of a replica, of a step that has as many for each."""
    samples, target = pictures(step)
    return samples.chunk(REPLICAS)[replica], target.chunk(REPLICAS)[replica]


def alone() -> Trained:
    """One process, in eager, with the micro-batches of all replicas."""
    model = made("resnet")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    losses, norms = [], []
    for step in range(STEPS):
        optimizer.zero_grad()
        found = []
        for sample, wanted in zip(
            *(part.split(MICRO_BATCH) for part in pictures(step)), strict=True
        ):
            loss = loss_of(model(sample), wanted)
            (loss / (REPLICAS * MICRO_BATCHES)).backward()
            found.append(loss.item())
        norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)))
        optimizer.step()
        losses.append(found)
    return Trained(losses, norms, dict(model.state_dict()))


def refused(rank: int, names: tuple[str, ...], sizes: tuple[int, ...]) -> str:
    """What a rank is told of a mesh that is not one of stages and replicas."""
    samples, target = share(0, 0)
    mesh = init_device_mesh("cpu", sizes, mesh_dim_names=names)
    try:
        cotrain_compile.pipeline(made("resnet"), PLAN, loss_of, (samples,), target, mesh=mesh)
    except CotrainError as error:
        return str(error)
    return "nothing"

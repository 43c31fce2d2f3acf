"""Checkpoints of models that `scale` has arranged: ranks save one together, others load it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_state_dict,
    set_state_dict,
)
from torch.distributed.checkpoint.state_dict_loader import load as load_checkpoint
from torch.distributed.checkpoint.state_dict_saver import save as save_checkpoint

import cotrain_compile
from tests.support.pipelines import loss_of
from tests.support.scaled_ranks import (
    MAX_NORM,
    SPLITS,
    Case,
    model_of,
    optimizer_of,
    samples_of,
)

# Stages have other parameters on each rank, so that a list of them would differ.
FLAT = StateDictOptions(flatten_optimizer_state_dict=True)


def goes_on(rank: int, case: Case, load: Path | None, save: Path, first: int) -> list[float]:
    """Two steps from number `first` on, from a checkpoint if one is given; the losses of all."""
    layout = case.layout
    ids, target = samples_of(0, layout, layout.replica(rank))
    model = model_of(case)
    scaled = cotrain_compile.scale(
        model, layout, loss_of, (ids,), target,
        stages=case.stages, tensor_plan=SPLITS[case.split](), options={"quiet": True},
    )  # fmt: skip
    optimizer = optimizer_of(case, scaled.parameters())
    if load is not None:
        restore(load, scaled.model, optimizer)
    step = scaled.compiled_step(optimizer, MAX_NORM)
    losses = []
    for number in range(first, first + 2):
        ids, target = samples_of(number, layout, scaled.replica)
        losses.append(float(step(ids, target=target)))
    save_checkpoint(states_of(scaled.model, optimizer), checkpoint_id=save)
    return losses


def states_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    states = get_state_dict(model, optimizer, options=FLAT)
    return dict(zip(("model", "optimizer"), states, strict=True))


def restore(folder: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    states = states_of(model, optimizer)
    load_checkpoint(states, checkpoint_id=folder)
    set_state_dict(
        model,
        optimizer,
        model_state_dict=states["model"],
        optim_state_dict=states["optimizer"],
        options=FLAT,
    )


def alone_goes_on(case: Case, load: Path, first: int) -> list[float]:
    """The same by one process in eager; the losses of each replica's samples, step by step."""
    model = model_of(case, seed=1)
    optimizer = optimizer_of(case, model.parameters())
    restore(load, model, optimizer)
    losses: list[float] = []
    replicas = case.layout.replicas
    for number in range(first, first + 2):
        optimizer.zero_grad()
        for replica in range(replicas):
            ids, target = samples_of(number, case.layout, replica)
            loss = loss_of(model(ids), target)
            (loss / replicas).backward()
            losses.append(loss.item())
        nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)
        optimizer.step()
    return losses

"""Runs of exchanges: layers of two widths on two ranks, and two workers with a CPU helper.

Layers sleep for what they take with the samples at hand, and exchanges take the network. Half of
the layers have width 2, half width 1. Gradients of the workers are summed after their backward, on
them and on the helper.

Predicted are the width planner's step, and the compute with the exchange that the planner of CPU
helpers says, and a round.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.nn import functional as F

import cotrain_compile
from bench.runtime.rank_bench import compared
from bench.runtime.slow_model import (
    BACKWARD_S,
    FORWARD_S,
    LAYER_BYTES,
    LAYERS,
    ROWS,
    WIDTH,
    Model,
    profile,
    slow_in_eager,
)
from cotrain_compile.cluster.helpers import share
from cotrain_compile.cluster.widths import WidthProblem, width_timeline
from cotrain_compile.distribute.cpu_helpers import HelpedExchange
from cotrain_compile.distribute.helped_rounds import ROUNDS
from cotrain_compile.machine import Network

WIDTHS = {f"layers.{layer}": 2 if layer < LAYERS // 2 else 1 for layer in range(LAYERS)}
# Gradients of the layers that both ranks have.
SUMMED_BYTES = LAYER_BYTES * LAYERS // 2
WORKERS, HELPERS = 2, 1
# Owners are drawn by chunk, so that shares are met by many of them.
CHUNK_BYTES = 1 << 12


def wide_steps(steps: int) -> list[float]:
    """Seconds of each step of a model with `WIDTHS` on this rank."""
    model, x = _model_and_batch()
    wide = cotrain_compile.burst(model, WIDTHS)
    taken_s = []
    for _ in range(steps):
        model.zero_grad()
        dist.barrier()
        began_s = time.perf_counter()
        wide.backward(F.mse_loss, x, x)
        taken_s.append(time.perf_counter() - began_s)
    return taken_s


def wide_record(ranks: Sequence[Mapping[str, Any]], hop: Network) -> dict[str, Any]:
    """Widths beside the width planner's step."""
    problem = WidthProblem(profile(), hop, ROWS, max(WIDTHS.values()))
    timeline = width_timeline(problem, WIDTHS, update_s=0.0)
    return compared("widths", timeline.makespan_s, ranks, {}, hop)


def helped_steps(steps: int) -> tuple[list[float], HelpedExchange]:
    """Seconds of each step of a worker, none of a helper; and the exchange that this rank makes."""
    model, x = _model_and_batch()
    taken_s = []
    with cotrain_compile.cpu_helpers(model, HELPERS, chunk_bytes=CHUNK_BYTES) as exchange:
        if exchange.helps:
            exchange.serve()
            return [], exchange
        for _ in range(steps):
            model.zero_grad()
            began_s = time.perf_counter()
            F.mse_loss(model(x), x).backward()
            exchange.average_gradients()
            taken_s.append(time.perf_counter() - began_s)
    return taken_s, exchange


def helped_record(ranks: Sequence[Mapping[str, Any]], hop: Network) -> dict[str, Any]:
    """Workers and helpers beside the planner's exchange, which follows the backward here.

    In rounds it takes one of them longer.
    """
    sharing = share(WORKERS, HELPERS, profile().grad_bytes, hop.bytes_per_s)
    predicted_s = LAYERS * (FORWARD_S + BACKWARD_S) + sharing.seconds * (1 + 1 / ROUNDS)
    planned = {"sent": [of_rank["planned_bytes"] for of_rank in ranks]}
    return compared("CPU helper", predicted_s, ranks, planned, hop)


def _model_and_batch() -> tuple[Model, torch.Tensor]:
    torch.manual_seed(0)
    return slow_in_eager(Model()), torch.randn(ROWS, WIDTH)

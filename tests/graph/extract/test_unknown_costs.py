"""Steps whose ops cost what nobody knows, and steps of experts whose cost is known."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import MixtralConfig, MixtralForCausalLM

from cotrain_compile.analysis.costs import roofline, with_measured
from cotrain_compile.dataflow import Dataflow
from cotrain_compile.entry.tracing import trace
from cotrain_compile.machine import MEMORIES
from cotrain_compile.placement.problem import formulate
from cotrain_compile.placement.search.solve import solve
from cotrain_compile.presets import find
from cotrain_compile.viz.text.describe import describe_step
from cotrain_compile.viz.text.summary import summary
from tests.support.blur import blur


@pytest.fixture(scope="module")
def blurred() -> Dataflow:
    def build() -> Any:
        model = torch.nn.Linear(64, 64)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

        def step(x: Tensor) -> None:
            optimizer.zero_grad()
            blur(model(x)).sum().backward()
            optimizer.step()

        return step, (torch.zeros(8, 64),)

    return trace(build)


def test_a_bound_that_leaves_out_an_unknown_op_is_not_called_certified(blurred: Dataflow) -> None:
    told = "1 ops of unknown cost (cotrain_tests.blur.default) move 4.0 KiB"
    assert told in describe_step(blurred)
    machine = find("rtx4090")
    problem = formulate(blurred, machine, dict.fromkeys(MEMORIES, 1 << 30))
    plan = solve(problem)
    assert plan.notes[0].startswith(told)
    assert plan.report is not None
    assert plan.report.bound_name == "bound without the cost of 1 ops, which is unknown"
    assert "not certified: it is a bound without" in summary(plan)


def test_a_measured_op_is_known(blurred: Dataflow) -> None:
    costs = roofline(blurred, find("rtx4090"))
    (name,) = costs.unknown
    assert with_measured(costs, device_s={name: 1e-3}).unknown == ()


# Mixture of experts.

EXPERTS: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "vocab_size": 256,
    "use_cache": False,
    "sliding_window": None,
}
BATCH, LENGTH = 2, 32


def mixtral(dtype: torch.dtype) -> Any:
    torch.set_default_dtype(dtype)  # fake parameters cannot be cast
    try:
        model = MixtralForCausalLM(MixtralConfig(**EXPERTS))
    finally:
        torch.set_default_dtype(torch.float32)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(tokens: Tensor) -> Tensor:
        optimizer.zero_grad()
        logits = model(input_ids=tokens).logits.float()
        loss = F.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())
        loss.backward()
        optimizer.step()
        return loss

    return step, (torch.zeros(BATCH, LENGTH, dtype=torch.int64),)


def mixtral_flops() -> int:
    """Six a weight that a token meets; attention: seven products over the pairs it keeps."""
    hidden, inner = 64, 96
    attention = hidden * (64 + 32 + 32 + 64)
    experts = hidden * 4 + 2 * 3 * hidden * inner  # the router, and two experts of each token
    weights = 2 * (attention + experts) + 256 * hidden
    pairs = BATCH * LENGTH * (LENGTH + 1) // 2
    return 6 * weights * BATCH * LENGTH + 2 * 7 * 2 * pairs * hidden


@pytest.mark.filterwarnings("ignore:Dynamo detected a call to a `functools.lru_cache`")
@pytest.mark.parametrize(
    "dtype",
    [torch.bfloat16, pytest.param(torch.float32, marks=pytest.mark.long)],
    ids=["torch's", "transformers'"],
)
def test_a_mixtral_step_has_the_flops_of_the_experts_that_tokens_meet(
    dtype: torch.dtype,
) -> None:
    dataflow = trace(lambda: mixtral(dtype))
    assert sum(op.flops for op in dataflow.ops) == pytest.approx(mixtral_flops(), rel=0.02)
    assert all(op.cost_is_known for op in dataflow.ops)
    assert any("grouped_mm" in op.target for op in dataflow.ops)

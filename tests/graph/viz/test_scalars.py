"""Scalars of a step: what its plan and its run say, as numbers, for trackers and notebooks."""

from __future__ import annotations

from html import escape
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import cotrain_compile
from cotrain_compile.integrations.trackers import to_tensorboard, to_wandb
from cotrain_compile.machine import MEMORIES
from tests.support.steps import Step


@pytest.fixture
def step() -> Step:
    """A step of four rows that runs with all of its updates on the host."""
    torch.manual_seed(0)
    model = nn.Linear(8, 4)
    optimizer = torch.optim.AdamW(model.parameters())

    @cotrain_compile.compile(policy="zero-offload", quiet=True)
    def train(x: Tensor) -> Tensor:
        loss: Tensor = model(x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    train(torch.ones(4, 8))
    return train


def test_they_are_what_the_compiled_step_says(step: Step) -> None:
    compiled, found = cotrain_compile.inspect(step), cotrain_compile.scalars(step)
    assert found["predicted_s"] == compiled.predicted.makespan_s
    assert found["measured_s"] == compiled.last_step_s
    assert compiled.measured is not None
    assert compiled.last_step_s is not None
    assert compiled.last_step_s >= compiled.measured.makespan_s
    for tier in MEMORIES:
        assert found[f"{tier}_peak_bytes"] == compiled.measured.peak_bytes[tier]
        assert found[f"{tier}_budget_bytes"] == compiled.plan.budgets[tier]
    assert found["offloaded_bytes"] == compiled.plan.bytes_moved("offload") > 0
    assert found["host_updates"] == 2
    assert "mfu" not in found


def test_tokens_make_rates(step: Step, monkeypatch: pytest.MonkeyPatch) -> None:
    compiled, found = cotrain_compile.inspect(step), cotrain_compile.scalars(step, tokens=4)
    assert found["tokens_per_s"] == pytest.approx(4 / found["measured_s"])
    # Products of 4 x 8 by 8 x 4 in the forward and for the weight, of 2 flops an element.
    flops = 2 * (2 * 4 * 8 * 4)
    rates = compiled.throughput(4)
    assert rates.flops_per_s * found["measured_s"] == pytest.approx(flops, rel=0.5)
    of_machine = compiled.problem.machine.device.flops_per_s_of("float32")
    assert found["mfu"] == rates.mfu == pytest.approx(rates.flops_per_s / of_machine)
    monkeypatch.setattr(compiled, "last_step_s", found["measured_s"] * found["mfu"] / 2)
    assert compiled.throughput(4).why_no_mfu
    assert cotrain_compile.scalars(step, tokens=4).keys() == found.keys() - {"mfu"}
    with pytest.raises(ValueError, match="0 tokens in"):
        cotrain_compile.scalars(step, tokens=0)


def test_trackers_get_them_under_one_prefix(step: Step) -> None:
    written: dict[str, float] = {}

    class Writer:
        def add_scalar(self, tag: str, scalar_value: float, global_step: int) -> None:
            assert global_step == 7
            written[tag] = scalar_value

    class Run:
        def log(self, data: dict[str, Any], step: int) -> None:
            assert step == 7
            logged.update(data)

    logged: dict[str, float] = {}
    to_tensorboard(Writer(), step, 7)
    to_wandb(Run(), step, 7, tokens=4)
    assert written == cotrain_compile.scalars(step, prefix="cotrain/")
    assert logged == cotrain_compile.scalars(step, tokens=4, prefix="cotrain/")


def test_a_notebook_shows_the_plan_and_the_report(step: Step, tmp_path: Path) -> None:
    compiled = cotrain_compile.inspect(step)
    told = "ZeRO-Offload's rule (zero-offload) on this-machine (rates guessed)"
    assert f"<td style='text-align:left'>{escape(told)}</td>" in compiled._repr_html_()
    assert f"plan: {told}" in repr(compiled)
    page = cotrain_compile.report(step, tmp_path / "report.html")
    assert (tmp_path / "report.html").read_text(encoding="utf-8") == page.html
    assert page._repr_html_().startswith('<iframe srcdoc="&lt;!doctype html&gt;')
    assert repr(page).startswith("<Report, an HTML page of ")

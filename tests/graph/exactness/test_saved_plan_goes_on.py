"""A plan in a file serves a training at another learning rate, or at one that changes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import cotrain_compile
from cotrain_compile import files
from cotrain_compile.backends import devices
from cotrain_compile.errors import PlanError
from cotrain_compile.plan import Plan


def trained(
    count: int, rates: str = "by hand", lr: float = 0.1, rows: int = 4, **options: Any
) -> tuple[list[Plan], list[float]]:
    """The plans that some steps ran by, with the rate halved between them, and their losses."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 16))
    optimizer = torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5) if rates == "scheduler" else None

    def step(x: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss: Tensor = model(x).square().mean()
        loss.backward()
        optimizer.step()
        return loss

    settings = {"quiet": True, "host_kernels": "captured", **options}
    run = torch.compile(step, backend="cotrain", options=settings)
    plans, losses = list[Plan](), list[float]()
    for _ in range(count):
        losses.append(run(torch.ones(rows, 16)).item())
        plans.append(cotrain_compile.inspect(run).plan)
        if scheduler is not None:
            scheduler.step()
        elif rates == "by hand":
            optimizer.param_groups[0]["lr"] *= 0.5
    return plans, losses


def test_where_the_rate_becomes_an_input_the_placement_is_still_the_plans(tmp_path: Path) -> None:
    """The step is traced anew then, and is another one than the plan was made for."""
    path = tmp_path / "plan.json"
    (plan,), _ = trained(1, policy="zero-offload")
    files.save(plan, path)
    (first, *_, last), losses = trained(3, plan=str(path))
    assert first == plan
    assert last.fingerprint != plan.fingerprint
    assert last.placement == plan.placement
    assert any("copies are scheduled anew" in note for note in last.notes)
    assert losses == trained(3, policy="zero-offload")[1]


def test_a_plan_serves_a_training_at_another_rate(tmp_path: Path) -> None:
    """The rate is a constant of the first trace, and nothing that a plan hangs on."""
    path = tmp_path / "plan.json"
    (plan,), _ = trained(1, policy="zero-offload")
    files.save(plan, path)
    (first, _), losses = trained(2, lr=0.7, plan=str(path))
    assert first == plan
    assert losses == trained(2, lr=0.7, policy="zero-offload")[1]


def test_a_dumped_plan_is_that_of_the_first_trace_and_the_next_run_begins_with_it(
    tmp_path: Path,
) -> None:
    """A trace with the rate as an input is dumped beside it; it would be refused in a new run."""
    folder = tmp_path / "out"
    (first, *_, last), losses = trained(3, policy="zero-offload", dump=str(folder))
    assert files.load(folder / "plan.json", Plan) == first
    assert files.load(folder / f"step-{last.fingerprint}" / "plan.json", Plan) == last
    assert losses == trained(3, plan=str(folder / "plan.json"))[1]


def test_a_plan_for_a_constant_rate_serves_one_that_changes(tmp_path: Path) -> None:
    """As a plan made offline does, whose job has no scheduler; not for a batch of another size."""
    path = tmp_path / "plan.json"
    (plan,), _ = trained(1, policy="zero-offload")
    files.save(plan, path)
    (first, last), losses = trained(2, "scheduler", plan=str(path))
    assert first == last
    assert first.fingerprint != plan.fingerprint
    assert first.placement == plan.placement
    assert any("other numbers in its optimizers" in note for note in first.notes)
    assert losses == trained(2, "scheduler", policy="zero-offload")[1]
    with pytest.raises(PlanError, match="made for another step"):
        trained(1, "scheduler", rows=5, plan=str(path))


def test_the_next_process_trains_by_the_plan_that_was_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COTRAIN_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(devices, "measured_machine", lambda device: None)  # would take a second
    settings: dict[str, Any] = {"policy": "zero-offload", "rates": "constant"}
    found, losses = trained(2, **settings)
    kept, again = trained(2, **settings)
    alone, _ = trained(2, plan_cache=False, **settings)
    assert again == losses
    assert kept[0].tasks == found[0].tasks
    told = [
        any("found before" in note for note in plans[0].notes) for plans in (found, kept, alone)
    ]
    assert told == [False, True, False]

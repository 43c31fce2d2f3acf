"""A first step that another process has run dry begins at once, and takes what that one took."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

import cotrain_compile
from cotrain_compile.backends.lifecycle.compiled_step import CompiledStep
from cotrain_compile.machine import Tier
from tests.support.steps import CASES, Run, cotrain, one, train

SGD = one(torch.optim.SGD, lr=0.05, momentum=0.9)
# Parameters move and activations leave, so that both tiers have a peak.
PLACED = {"policy": "coarse", "quiet": True, "host_kernels": "captured", "plan_cache": False}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where dry runs are kept, on the machine of the options, by nobody yet."""
    monkeypatch.setenv("COTRAIN_CACHE_DIR", str(tmp_path))
    return tmp_path / "dry runs"


@contextmanager
def counting_dry_runs() -> Iterator[list[None]]:
    dry_run, found = CompiledStep.dry_run, list[None]()

    def count(self: CompiledStep, inputs: Any, *, again: bool = False) -> None:
        found.append(None)
        dry_run(self, inputs, again=again)

    with mock.patch.object(CompiledStep, "dry_run", count):
        yield found


def trained(**options: Any) -> tuple[int, CompiledStep, Run]:
    """How often a process that begins runs dry, its step after training, and what it trained."""
    torch._dynamo.reset()
    steps: list[Any] = []
    settings = {**PLACED, "lowering": "eager", "machine": "rtx4090", **options}
    with counting_dry_runs() as dry_runs:
        run = train(CASES["mlp"], SGD, cotrain(**settings), steps.append, steps=1)
    return len(dry_runs), cotrain_compile.inspect(steps[-1]), run


@pytest.mark.parametrize("lowering", [pytest.param("eager", marks=pytest.mark.long), "inductor"])
def test_the_next_process_trains_the_same_without_a_dry_run(lowering: str, folder: Path) -> None:
    dry_run_first, first, run = trained(lowering=lowering)
    again, second, run_again = trained(lowering=lowering)
    assert (dry_run_first, again) == (1, 0)
    assert second.measured is not None
    assert second.measured.peak_bytes[Tier.DEVICE] == second.dry_run_device_bytes
    assert second.dry_run_device_bytes == first.dry_run_device_bytes
    assert all(map(torch.equal, run_again.losses, run.losses))
    assert all(torch.equal(run_again.tensors[name], value) for name, value in run.tensors.items())


def test_what_was_compiled_otherwise_has_a_dry_run(folder: Path) -> None:
    trained()
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(threads + 1)
        assert trained()[0] == 1
    finally:
        torch.set_num_threads(threads)
    assert trained(policy="zero-offload")[0] == 1
    assert trained(poison=False)[0] == 1
    assert trained()[0] == 0


REPEATED = '{"device": 1, "device": 2, "host": 0}'


def test_a_file_that_is_damaged_or_above_the_budget_counts_as_absent(folder: Path) -> None:
    trained()
    (path,) = folder.iterdir()
    whole = path.read_bytes()
    most = 1 << 50
    for content in (
        "",
        "[]",
        '{"device": 1.5, "host": 0}',
        f'{{"device": {most}, "host": 0}}',
        REPEATED,
    ):
        path.write_text(content)
        assert trained()[0] == 1
        assert path.read_bytes() == whole


def test_a_file_that_says_too_little_is_forgotten_after_the_step(folder: Path) -> None:
    trained()
    (path,) = folder.iterdir()
    path.write_text('{"device": 10, "host": 10}')
    assert trained()[0] == 0
    assert not path.exists()
    assert trained()[0] == 1


@torch.library.custom_op("kept_dry_runs::double", mutates_args=())
def double(x: Tensor) -> Tensor:
    return x * 2


double.register_fake(torch.empty_like)
double.register_autograd(lambda _, gradient: gradient * 2)


def test_a_step_with_kernels_of_others_has_a_dry_run_in_every_process(folder: Path) -> None:
    for _ in range(2):
        torch._dynamo.reset()
        model = nn.Linear(4, 4)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

        def step(x: Tensor, model: nn.Module = model, optimizer: Any = optimizer) -> Tensor:
            optimizer.zero_grad()
            loss: Tensor = double(model(x)).square().mean()
            loss.backward()
            optimizer.step()
            return loss.detach()

        with counting_dry_runs() as dry_runs:
            cotrain(lowering="eager", machine="rtx4090")(step)(torch.ones(2, 4))
        assert len(dry_runs) == 1
    assert not folder.exists()

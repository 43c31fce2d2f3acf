"""What the GPU suite does with peers and with capped memory, as far as a CPU can show it."""

from __future__ import annotations

import json
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch._functorch._activation_offloading.activation_offloading
import torch._functorch.config
from torch import Tensor

from bench.gpu import largest as gpu_largest
from bench.gpu import suite as gpu_suite
from bench.gpu.largest import LAYERS, cotrain, deep, is_out_of_memory, largest, runs
from bench.gpu.measure import covered
from bench.gpu.model import SIZES, Size, Training
from bench.gpu.peers import PEERS, Peer, Step, compiled_offloading
from cotrain_compile.errors import OutOfDeviceMemory

TINY = replace(SIZES["tiny"], shape=replace(SIZES["tiny"].shape, layers=1))
HERE = [peer for peer in PEERS if peer.missing("cpu") is None]


@pytest.mark.parametrize(
    "peer",
    [
        pytest.param(peer, marks=pytest.mark.long if "torch.compile" in peer.name else ())
        for peer in HERE
    ],
    ids=lambda peer: peer.name,
)
def test_a_peer_trains_the_same_model(peer: Peer) -> None:
    batch = TINY.batch("cpu")

    def losses(step: Step) -> Tensor:
        return torch.stack([step(*batch).detach() for _ in range(3)])

    torch._dynamo.reset()
    expected = losses(Training(TINY, "cpu").step)
    with peer.session(TINY, "cpu") as step:
        found = losses(step)
    assert expected[2] < expected[0]
    # Weights in bfloat16, as some peers keep them, move the loss by less than a step of training.
    torch.testing.assert_close(found, expected, rtol=0, atol=2e-2)


@pytest.mark.long
def test_the_compiled_peer_really_offloads_what_it_saves() -> None:
    """The switch is a private one of torch's: it may change its name or what it listens to."""
    passes = torch._functorch._activation_offloading.activation_offloading
    torch._dynamo.reset()
    with (
        mock.patch.object(passes, "offload_chosen_sets", wraps=passes.offload_chosen_sets) as spy,
        torch._functorch.config.patch(enable_autograd_cache=False),
        compiled_offloading(TINY, "cpu") as step,
    ):
        step(*TINY.batch("cpu"))
    (forward, _), _ = spy.call_args
    offloads = [node for node in forward.graph.nodes if node.name.startswith("cpu_offload")]
    assert len(offloads) >= TINY.shape.layers


def test_what_is_not_here_says_why() -> None:
    absent = replace(PEERS[0], needs="no_such_package")
    assert absent.missing("cuda") == "no_such_package is not installed"
    assert replace(PEERS[0], cpu=False).missing("cpu") == "needs a card"


def test_the_suite_has_a_row_for_every_peer(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def quick(size: Size, device: str) -> AbstractContextManager[Step]:
        return nullcontext(lambda *batch: batch[0].sum())

    peers = [Peer("quick", quick, remark="adds tokens"), replace(PEERS[0], needs="no_such_package")]
    output = tmp_path / "suite.json"
    with mock.patch.object(gpu_suite, "PEERS", peers):
        gpu_suite.main(["--device", "cpu", "-o", str(output), "--only", "peers"])
    result = json.loads(output.read_text())["result"]
    quick_row, absent = result["peers"]
    assert len(quick_row["seconds"]) == 4
    assert absent["error"] == "no_such_package is not installed"
    assert "1 of 2 rows have errors" in capsys.readouterr().out


@pytest.mark.parametrize("limit", [0, 2, 7, 20, 99])
def test_the_largest_that_fits_is_found_in_few_trials(limit: int) -> None:
    tried: list[int] = []

    def fits(layers: int) -> bool:
        tried.append(layers)
        return layers <= limit

    assert largest(LAYERS, fits) == max((n for n in LAYERS if n <= limit), default=None)
    assert len(tried) <= 3


def test_only_a_lack_of_memory_means_that_a_model_is_too_large() -> None:
    def session(error: Exception) -> gpu_largest.Session:
        def failing(*batch: Tensor) -> None:
            raise RuntimeError("in a step") from error

        return lambda size, device: nullcontext(failing)

    assert not runs(session(torch.OutOfMemoryError("full")), TINY, "cpu")
    assert not is_out_of_memory(ValueError("other"))
    with pytest.raises(RuntimeError, match="in a step"):
        runs(session(ValueError("other")), TINY, "cpu")


@pytest.mark.long  # the suite runs placed steps in every run
def test_a_placed_step_runs_within_a_cap_or_does_not_fit() -> None:
    def within(cap_bytes: int) -> bool:
        return runs(lambda *given: cotrain(cap_bytes, "streamed", *given), TINY, "cpu")

    assert within(1 << 30)
    assert not within(1 << 16)


def test_out_of_device_memory_is_a_lack_of_memory() -> None:
    from cotrain_compile.machine import Tier

    assert is_out_of_memory(OutOfDeviceMemory("full", tier=Tier.DEVICE))


def test_a_deep_model_has_the_parameters_it_says() -> None:
    # 12 width^2 a layer and two embeddings of 50304 x 4096.
    assert deep(2, "cuda").parameters == 24 * 4096**2 + 2 * 50304 * 4096


def test_the_suite_searches_for_every_way_and_cap(tmp_path: Path) -> None:
    def up_to(layers: int) -> gpu_largest.Session:
        def session(size: Size, device: str) -> AbstractContextManager[Step]:
            if size.shape.layers > layers:
                raise torch.OutOfMemoryError("full")
            return nullcontext(lambda *batch: None)

        return session

    def ways(device: str, cap_bytes: int, policy: str) -> dict[str, gpu_largest.Session]:
        return {"one": up_to(cap_bytes // 2**33), "none": up_to(0)}

    output = tmp_path / "suite.json"
    with mock.patch.object(gpu_suite, "ways", ways):
        gpu_suite.main(["--device", "cpu", "-o", str(output), "--only", "largest"])
    rows = json.loads(output.read_text())["result"]["largest"]
    assert {row["name"]: row["layers"] for row in rows} == {
        "one, 24 GiB": 2,
        "none, 24 GiB": None,
        "one, 80 GiB": 8,
        "none, 80 GiB": None,
    }


def test_time_in_which_two_kernels_run_counts_once() -> None:
    assert covered([(0, 4), (1, 2), (3, 6), (8, 9)]) == 7
    assert covered([]) == 0

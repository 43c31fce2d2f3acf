"""A step for a card, on a machine without one: traced, planned, rewritten and cut into segments.

The card is `tests/fake_cuda`: a library of ours that makes torch believe in one. It is loaded
before torch, so the steps run in a process of their own, the same one for all stories here.
`python -m bench.gpu.fake_cuda` runs many more.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
import torch

import cotrain_compile
from cotrain_compile.capture.offline.card_attention import (
    BFLOAT16,
    DEPRIORITIZED,
    FLOAT,
    HALF,
    IN_SIXTEENTHS,
    AttentionCall,
    AttentionKernel,
    kernel_of,
    usual_order,
)
from cotrain_compile.capture.offline.forked import in_a_copy
from cotrain_compile.errors import CaptureError, OptionError
from tests.fake_cuda.library import compiler
from tests.fake_cuda.processes import ENVIRONMENT, ROOT, results_of
from tests.fake_cuda.trainings import CHECKPOINTS, readme_job

POLICIES = ("resident", "zero-offload", "streamed", "auto", "streamed, all made again")
# Every precision, every kernel of attention, and both ways to accumulate.
KINDS: tuple[dict[str, Any], ...] = (
    {"precision": "float32", "attention": "math", "micro_batches": 2},
    {"precision": "bfloat16 weights", "attention": "flash"},
    {"precision": "bfloat16 autocast", "attention": "efficient"},
    {"precision": "float16 scaled", "attention": "cudnn"},
)
TRAININGS = (
    *("readme", "every optimizer", "llama", "flex"),
    *("flash package", "flash package, packed", "llama, flash_attention_2"),
)
# What a checkpoint of the user's makes again has attention in it; with dropout that is kept.
CHECKPOINTED: dict[str, dict[str, Any]] = {
    f"{precision}, {attention} in a {kind} checkpoint, {checkpoints}, dropout {dropout}": {
        "precision": precision,
        "attention": attention,
        "checkpointed": kind,
        "checkpoints": checkpoints,
        "dropout": dropout,
    }
    for precision, attention in (
        ("bfloat16 autocast", "flash"),
        ("float16 scaled", "cudnn"),
        ("bfloat16 weights", "cudnn"),
        ("float32", "efficient"),
    )
    for kind in CHECKPOINTS
    for checkpoints in ("respect", "dissolve")
    for dropout in (0.0, 0.125)
} | {
    f"llama in a {kind} checkpoint": {"training": "llama", "checkpointed": kind}
    for kind in CHECKPOINTS
}

H100, NEW = (9, 0), 91900  # a compute capability, a version of cuDNN

pytestmark = pytest.mark.skipif(compiler() is None, reason="needs a C++ compiler")


CELLS: dict[tuple[str, str], dict[str, Any]] = {
    (name, policy): {**cell, "policy": policy}
    for name, cell in {
        **{name: {"training": name} for name in TRAININGS},
        **{str(cell["precision"]): cell for cell in KINDS},
        **CHECKPOINTED,
    }.items()
    for policy in POLICIES
}
# Policies, kernels and trainings; the trace that `trace` is compared with.
IN_EVERY_RUN = {
    ("readme", "streamed"),
    ("every optimizer", "zero-offload"),
    ("flex", "auto"),
    ("flash package, packed", "zero-offload"),
    ("llama, flash_attention_2", "streamed"),
    ("float16 scaled", "resident"),
    ("bfloat16 autocast, flash in a not reentrant checkpoint, respect, dropout 0.0", "auto"),
    ("float32, efficient in a reentrant checkpoint, respect, dropout 0.125", "zero-offload"),
}


@pytest.fixture(scope="module")
def results(request: pytest.FixtureRequest) -> dict[tuple[str, str], dict[str, Any]]:
    """By precision or training, and policy: those in every run, and others that are asked for."""
    own = [item for item in request.session.items if getattr(item, "module", 0) is request.module]
    asked = [item.callspec.params for item in own if hasattr(item, "callspec")]
    wanted = IN_EVERY_RUN | {(p.get("name"), p.get("policy")) for p in asked}
    cells = {key: cell for key, cell in CELLS.items() if key in wanted}
    # One more, with which the training behind it shares Dynamo's trace.
    shared = KINDS[-1]
    place = [cell.get("precision") for cell in cells.values()].index(shared["precision"])
    asked = list(cells.values())
    asked.insert(place, {**shared, "attention": "math", "policy": "resident"})
    found = results_of(asked)
    assert not found.pop(place)["error"]
    return dict(zip(cells, found, strict=True))


@pytest.mark.parametrize(
    ("name", "policy"),
    [pytest.param(*key, marks=() if key in IN_EVERY_RUN else pytest.mark.long) for key in CELLS],
)
def test_a_step_for_a_card_goes_through_to_its_segments(
    results: Mapping[tuple[str, str], dict[str, Any]], name: str, policy: str
) -> None:
    found = results[name, policy]
    assert not found["error"], found["error"]
    assert found["segments"]
    assert (found["tasks"] > 0) == (policy != "resident")


# The same step, traced for a card by `trace`.


TRACED = """
import torch, cotrain_compile
from tests.fake_cuda.absent_library import compile_once
from cotrain_compile.errors import OptionError
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.parallel import DistributedDataParallel
from tests.fake_cuda.trainings import job

def norms_of_ranks():
    layers = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.BatchNorm1d(4))
    model = DistributedDataParallel(torch.nn.SyncBatchNorm.convert_sync_batchnorm(layers))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(x):
        # A number and an empty tensor made on the card, as a cache of Hugging Face's makes one.
        half, empty = torch.tensor(0.5, device=x.device), torch.tensor([], device=x.device)
        loss = half * torch.cat([empty.view(0, 4), model(x)]).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    return step, (torch.randn(6, 4),)

compile_once()
traced = cotrain_compile.trace(lambda: job("AdamW", "float16 scaled"), machine="h100")
print("TRACED", traced.fingerprint, sep="/")
def as_the_user_says():
    layer = torch.nn.Linear(64, 192, bias=False)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
    rates = [rate.item() for rate in torch.linspace(0, 0.1, 3)]  # made on the card

    def attention(x, **kwargs):
        query, key, value = (p.view(2, 1, 64, 64) for p in layer(x).chunk(3, -1))
        return torch.nn.functional.scaled_dot_product_attention(query, key, value, **kwargs).sum()

    def step(x):
        with torch.autocast(x.device.type, torch.bfloat16):
            loss = attention(x) + attention(x, dropout_p=rates[-1])
            with sdpa_kernel(SDPBackend.MATH):
                loss = loss + attention(x)
            with sdpa_kernel(SDPBackend.EFFICIENT_ATTENTION):
                loss = loss + attention(x)
            with sdpa_kernel([SDPBackend.FLASH_ATTENTION, SDPBackend.MATH], set_priority=True):
                loss = loss + attention(x)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    return step, (torch.randn(2, 64, 64),)

traced = cotrain_compile.trace(as_the_user_says, machine="h100")
targets = [op.target for op in traced.ops if op.target.startswith("aten._scaled_dot")]
kernels = [target.split("_")[4] for target in targets if "backward" not in target]
print("KERNELS", *kernels, sep="/")
print("ASSUMED", *traced.notes, sep="|")
traced = cotrain_compile.trace(norms_of_ranks, machine="h100", ranks=2)
exchanges = sorted(op.target.split(".")[1] for op in traced.ops if "_c10d" in op.target)
print("RANKS", *(name for name in exchanges if name != "wait_tensor"), sep="/")
assert not torch.cuda.is_available()

torch.ones(1, requires_grad=True).sum().backward()
try:
    cotrain_compile.trace(lambda: job("AdamW", "float32"), device="cuda")
except OptionError as error:
    print("TOLD", error, sep="/")
"""


def test_a_trace_for_a_card_is_that_of_the_step_on_it(
    results: Mapping[tuple[str, str], dict[str, Any]],
) -> None:
    """So a plan made offline is accepted there. An H100 takes cuDNN's attention, or what the user
    allows.

    Once torch has run a backward it is too late for a card.
    """
    run = subprocess.run(
        [sys.executable, "-c", TRACED], capture_output=True, text=True, cwd=ROOT, env=ENVIRONMENT
    )
    assert run.returncode == 0, run.stderr[-3000:]
    lines = [line.split("/") for line in run.stdout.splitlines() if "/" in line]
    (found,) = [line[1] for line in lines if line[0] == "TRACED"]
    assert found == results["float16 scaled", "resident"]["fingerprint"]
    (kernels,) = [line[1:] for line in lines if line[0] == "KERNELS"]
    # cuDNN's dropout is rounded to sixteenths; not every torch minds.
    dropped = "flash" if IN_SIXTEENTHS else "cudnn"
    assert kernels == ["cudnn", dropped, "efficient", "flash"]
    (told,) = [line for line in run.stdout.splitlines() if line.startswith("ASSUMED")]
    assert re.search(r"1 attentions are traced as cuDNN's, as with cuDNN \d+\.\d+\.\d+;", told)
    (exchanges,) = [line[1:] for line in lines if line[0] == "RANKS"]
    assert {"all_gather_into_tensor", "reduce_scatter_tensor"} <= set(exchanges)
    assert 1 <= exchanges.count("all_reduce") <= 4
    assert [line[1] for line in lines if line[0] == "TOLD" and "before that" in line[1]]


LLAMA = """
import sys

sys.path.insert(0, "docs/examples")
import cotrain_compile, llama

traced = cotrain_compile.trace(llama.llama_7b, machine="rtx4090")
flash = [op for op in traced.ops if op.target == "aten._scaled_dot_product_flash_attention.default"]
products = [op.dtype for op in traced.ops if op.target == "aten.mm.default"]
print("TRACED", len(flash), len(products), *sorted(set(products)))
"""


@pytest.mark.long
def test_a_7b_step_for_a_4090_has_flash_attention_and_bfloat16_products() -> None:
    """Seven linear layers a block and the head; each again for two gradients.

    A small Llama is looked at in the same way above (`cells._look_at_attention`).
    """
    run = subprocess.run(
        [sys.executable, "-c", LLAMA], capture_output=True, text=True, cwd=ROOT, env=ENVIRONMENT
    )
    assert run.returncode == 0, run.stderr[-3000:]
    (line,) = [line for line in run.stdout.splitlines() if line.startswith("TRACED")]
    assert line == f"TRACED 32 {21 * 32 + 3} bfloat16"


def test_errors_of_a_trace_for_a_card_reach_its_caller(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails() -> None:
        raise ValueError("no such model")

    with pytest.raises(ValueError, match="no such model"):
        in_a_copy(fails)
    with pytest.raises(CaptureError, match="ended with 3"):
        in_a_copy(lambda: os._exit(3))
    with pytest.raises(OptionError, match="'tpu'"):
        cotrain_compile.trace(readme_job, device="tpu")
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(OptionError, match=r"needs a C\+\+ compiler"):
        cotrain_compile.trace(readme_job, device="cuda")


def test_an_autocast_that_torch_turns_off_is_no_trace_in_full_precision() -> None:
    model = torch.nn.Linear(4, 4)

    def step(x: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cuda", dtype=torch.bfloat16):
            return model(x)  # type: ignore[no-any-return]

    with pytest.raises(
        CaptureError,
        match=r'autocast\("cuda"\) is off.*--device cuda or trace\(\.\.\., device="cuda"\)\Z',
    ):
        cotrain_compile.trace(lambda: (step, (torch.zeros(2, 4),)))


def call(**changes: Any) -> AttentionCall:
    """Causal attention in bfloat16 with heads of 128."""
    usual = AttentionCall(
        dtype=BFLOAT16,
        query_width=128,
        key_width=128,
        value_width=128,
        square=True,
        empty=False,
        grouped=False,
        mask=False,
        mask_grad=False,
        grad=True,
        dropout=False,
        causal=True,
        dense=True,
        sixteenths=True,
        one_query=False,
        one_key=False,
        deterministic=False,
    )
    return replace(usual, **changes)


@pytest.mark.parametrize(
    ("changes", "capability", "kernel"),
    [
        ({}, (8, 9), AttentionKernel.FLASH),
        ({}, (9, 0), AttentionKernel.CUDNN),
        ({}, (7, 0), AttentionKernel.MATH),  # no bfloat16 there
        ({"dtype": HALF}, (7, 0), AttentionKernel.EFFICIENT),
        ({"dtype": FLOAT}, (9, 0), AttentionKernel.EFFICIENT),
        ({"mask": True, "causal": False}, (8, 9), AttentionKernel.EFFICIENT),
        ({"mask": True, "causal": False, "mask_grad": True}, (8, 9), AttentionKernel.MATH),
        ({"square": False}, (8, 0), AttentionKernel.EFFICIENT),
        ({"dense": False}, (9, 0), AttentionKernel.MATH),
    ],
)
def test_attention_takes_the_kernel_that_torch_takes_on_the_card(
    changes: dict[str, Any], capability: tuple[int, int], kernel: AttentionKernel
) -> None:
    order = usual_order(capability, cudnn=NEW)
    assert kernel_of(call(**changes), capability, order, cudnn=NEW) is kernel


@pytest.mark.parametrize("changes", [{"one_key": True}, {"deterministic": True}])
def test_attention_that_cudnn_cannot_do_is_left_to_flash(changes: dict[str, Any]) -> None:
    order = usual_order(H100, cudnn=NEW)
    assert kernel_of(call(**changes), H100, order, cudnn=NEW) is AttentionKernel.FLASH


@pytest.mark.parametrize(
    ("changes", "cudnn", "does"),
    [
        ({}, NEW, True),
        ({"sixteenths": False}, NEW, not IN_SIXTEENTHS),
        ({"one_query": True}, NEW, False),
        ({}, 91200, False),
        ({}, 91000, True),
    ],
)
def test_cudnn_drops_out_where_its_version_does(
    changes: dict[str, Any], cudnn: int, does: bool
) -> None:
    """Where it is alone allowed, there is no kernel otherwise."""
    order = [-1, AttentionKernel.CUDNN]
    kernel = kernel_of(call(dropout=True, **changes), H100, order, cudnn=cudnn)
    assert kernel is (AttentionKernel.CUDNN if does else AttentionKernel.NONE)
    assert kernel_of(call(**changes), H100, order, cudnn=cudnn) is AttentionKernel.CUDNN


def test_cudnn_comes_first_on_some_cards_if_it_is_new(monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch asks it last otherwise, and where its environment says so."""
    assert usual_order(H100, cudnn=91501)[0] is AttentionKernel.CUDNN
    assert usual_order(H100, cudnn=91500)[-1] is AttentionKernel.CUDNN
    assert usual_order((8, 0), cudnn=NEW)[-1] is AttentionKernel.CUDNN
    monkeypatch.setenv(DEPRIORITIZED, "1")
    assert usual_order(H100, cudnn=NEW)[-1] is AttentionKernel.CUDNN

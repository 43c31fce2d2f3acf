"""Steps that people train, for a 4090 and an H100 that are not there, through to their segments.

They are built in `tests/fake_cuda/steps_of_images.py` and `steps_of_text.py`, and run in a process
of their own, which stands beside the card.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from typing import Any

import pytest

from tests.fake_cuda.library import compiler
from tests.fake_cuda.processes import results_of

POLICIES = (
    "resident",
    "zero-offload",
    "streamed",
    "auto",
    "streamed, all made again",
    "streamed, in parts",
)
MACHINES = ("rtx4090", "h100")
STEPS = (
    "ViT with stochastic depth",
    "Swin",
    "Swin in float32",
    "U-Net with cross attention",
    "DINO with an EMA teacher",
    "Llama with reentrant checkpoints",
    "Llama with checkpoints",
    "sliding windows",
    "sliding windows in float32",
    "Whisper",
    "a packed batch with a mask of blocks",
    "a packed batch by flex_attention",
    "a packed batch by its lengths",
    "LoRA over a base of 8 bits",
    "a mixture of experts with checkpoints",
    "Mixtral with checkpoints",
)
CELLS = tuple(itertools.product(STEPS, MACHINES, POLICIES))
IN_EVERY_RUN = {
    ("a packed batch by its lengths", "h100", "streamed, all made again"),
    ("ViT with stochastic depth", "rtx4090", "streamed, in parts"),  # fused kernels, and MLPs
}

pytestmark = pytest.mark.skipif(compiler() is None, reason="needs a C++ compiler")

Key = tuple[str, str, str]


@pytest.fixture(scope="module")
def results(request: pytest.FixtureRequest) -> dict[Key, dict[str, Any]]:
    """What came of each cell that is asked for."""
    own = [item for item in request.session.items if getattr(item, "module", 0) is request.module]
    asked = {tuple(item.callspec.params.values()) for item in own if hasattr(item, "callspec")}
    keys = [key for key in CELLS if key in asked]
    cells = [{"training": step, "machine": on, "policy": policy} for step, on, policy in keys]
    return dict(zip(keys, results_of(cells, module="tests.fake_cuda.absent"), strict=True))


@pytest.mark.parametrize(
    ("step", "machine", "policy"),
    [pytest.param(*key, marks=() if key in IN_EVERY_RUN else pytest.mark.long) for key in CELLS],
)
def test_a_step_that_people_train_reaches_its_segments(
    results: Mapping[Key, dict[str, Any]], step: str, machine: str, policy: str
) -> None:
    found = results[step, machine, policy]
    assert not found["error"], found["error"]
    assert found["segments"]
    # `auto` may meet the budget by making values again alone.
    does = found["tasks"] + found["again"] if policy == "auto" else found["tasks"]
    assert (does > 0) == (policy != "resident")
    assert (found["again"] > 0) or "again" not in policy

"""A step whose ATen graph another process has kept is the step that would be lowered."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn
from torch._dynamo.utils import counters
from torch._functorch._aot_autograd.autograd_cache import AOTAutogradCache
from torch.utils.checkpoint import checkpoint

import cotrain_compile
from cotrain_compile import files
from cotrain_compile.backends import devices
from cotrain_compile.capture.aten import trace_cache
from cotrain_compile.capture.aten.trace_cache import digest_of, may_be_kept
from cotrain_compile.errors import CaptureError
from cotrain_compile.graph import StepGraph
from tests.support.same_graphs import described
from tests.support.steps import CASES, all_tensors, compiling_with, cotrain

pytestmark = pytest.mark.skipif(
    not torch.__version__.startswith(trace_cache.TRIED), reason="graphs are kept on torch 2.13"
)


@pytest.fixture
def kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Where graphs are kept, by a process that was never here before."""
    monkeypatch.setenv("COTRAIN_CACHE_DIR", str(tmp_path / "ours"))
    monkeypatch.setattr(devices, "measured_machine", lambda device: None)  # would take a second
    monkeypatch.setattr(AOTAutogradCache, "_get_tmp_dir", lambda: str(tmp_path / "torch"))
    counters.clear()
    yield tmp_path / "torch"
    torch._dynamo.reset()


def trained(name: str, through: Callable[..., Any] | None = None) -> Any:
    """Train three steps under a schedule, as a process that begins: the step, losses, tensors."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    case = CASES[name]
    model = case.make_model().train()
    batches = [case.make_batch() for _ in range(3)]
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)

    called: Any = model if through is None else functools.partial(through, model)

    def step(*batch: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss = case.loss_of(called, *batch)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        return loss.detach()

    compiled = cotrain(policy="resident", lowering="eager")(step)
    losses = []
    for batch in batches:
        losses.append(float(compiled(*batch)))
        scheduler.step()
    return cotrain_compile.inspect(compiled), losses, all_tensors(model, [optimizer])


def checkpointed(model: nn.Module, *batch: Tensor) -> Any:
    return checkpoint(model, *batch, use_reentrant=False)


@pytest.mark.parametrize(
    ("name", "through"),
    [pytest.param("mlp", None, marks=pytest.mark.long), ("tied", checkpointed)],
    ids=["mlp", "checkpointed"],
)
def test_a_step_found_on_disk_is_the_one_that_is_lowered(
    name: str, through: Any, kept: Path
) -> None:
    first, losses, tensors = trained(name, through)
    again, losses_again, tensors_again = trained(name, through)
    assert counters["aot_autograd"]["autograd_cache_saved"] == 1
    assert counters["aot_autograd"]["autograd_cache_hit"] == 1
    assert described(again.graph.module) == described(first.graph.module)
    assert files.to_json(again.problem.dataflow) == files.to_json(first.problem.dataflow)
    assert losses_again == losses
    assert all(torch.equal(tensors_again[key], value) for key, value in tensors.items())
    assert loss_of_graph(again.graph.module).equal(loss_of_graph(first.graph.module))


def loss_of_graph(module: fx.GraphModule) -> Tensor:
    """The loss of the graph, called as it is, where all that it is given is ones."""
    values = [node.meta["val"] for node in module.graph.find_nodes(op="placeholder")]
    with torch.no_grad():
        results = module(*(torch.ones(v.shape, dtype=v.dtype) for v in values))
    return next(r for r in results if isinstance(r, Tensor))


def test_a_damaged_file_counts_as_absent(kept: Path) -> None:
    _, losses, _ = trained("mlp")
    (path,) = (path for path in kept.rglob("*") if path.is_file())
    path.write_bytes(path.read_bytes()[:1000])
    _, losses_again, _ = trained("mlp")
    assert losses_again == losses
    assert not counters["aot_autograd"]["autograd_cache_hit"]


def test_an_error_of_what_compiles_a_found_graph_is_told_once(kept: Path) -> None:
    trained("mlp")
    refusals = []

    def refuse(*_: Any) -> None:
        refusals.append(CaptureError("no such plan"))
        raise refusals[-1]

    with compiling_with(refuse), pytest.raises(CaptureError, match="no such plan"):
        trained("mlp")
    assert len(refusals) == 1
    assert counters["aot_autograd"]["autograd_cache_hit"] == 1


@pytest.mark.parametrize("name", [pytest.param("llama", marks=pytest.mark.long), "conv"])
def test_a_graph_that_is_read_again_is_the_one_that_was_written(name: str) -> None:
    compared = []

    def compare(step: StepGraph, values: Any, options: Any) -> Any:
        step.nodes[0].meta["val"].untyped_storage().resize_(1 << 20)  # shows a part of it
        kept = trace_cache.written(step.module, step.checkpoints)
        assert kept is not None
        mode = next(n.meta["val"].fake_mode for n in step.nodes if "val" in n.meta)
        compared.append(described(step.module))
        read = described(trace_cache.read_again(kept, mode))
        for node, written in zip(read, compared[0], strict=True):
            assert node == written
        raise CaptureError("compared")

    with compiling_with(compare), pytest.raises(CaptureError, match="compared"):
        trained(name)
    assert compared


# What a graph depends on, beside torch's key.


def noted(line: str = "loss = f(x)", phase: str = "optimizer") -> fx.GraphModule:
    graph = fx.Graph()
    x, y = graph.placeholder("x"), graph.placeholder("y")
    total = graph.call_function(torch.add, (x, y))
    total.meta = {"stack_trace": line, "custom": {"cotrain_phase": phase}}
    graph.output((total,))
    return fx.GraphModule({}, graph)


def two(shared: bool) -> list[Tensor]:
    whole = torch.zeros(8)
    return [whole[:4], whole[4:]] if shared else [whole[:4], torch.zeros(8)[4:]]


def test_what_a_graph_depends_on_is_in_its_digest() -> None:
    usual = digest_of(noted(), two(shared=True), ())
    assert usual == digest_of(noted(), two(shared=True), ())
    others = [
        digest_of(noted(line="y = f(x)"), two(shared=True), ()),
        digest_of(noted(phase="backward"), two(shared=True), ()),
        digest_of(noted(), two(shared=False), ()),
        digest_of(noted(), two(shared=True), (True,)),
    ]
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        others.append(digest_of(noted(), two(shared=True), ()))
    backends = torch.nn.attention.SDPBackend
    for order in (
        [backends.MATH, backends.FLASH_ATTENTION],
        [*backends.__members__.values()][::-1],
    ):
        with torch.nn.attention.sdpa_kernel(order[:2], set_priority=True):
            others.append(digest_of(noted(), two(shared=True), ()))
    assert len({usual, *others}) == 8


def test_what_may_depend_on_more_is_not_kept(kept: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    inputs = two(shared=False)
    assert may_be_kept(noted(), inputs)
    assert not may_be_kept(noted(), [1.0, *inputs])
    constant = noted()
    constant.register_buffer("constant", torch.ones(1))
    constant.graph.get_attr("constant")
    assert not may_be_kept(constant, inputs)
    monkeypatch.setenv("COTRAIN_CACHE_DIR", "")
    assert not may_be_kept(noted(), inputs)

"""Which gradients a compiled step with `DistributedDataParallel` reduces, and when."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import fx, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel

import cotrain_compile
from cotrain_compile.backends.inductor.lower import segments_of
from cotrain_compile.capture.aten import bucket_exchanges
from cotrain_compile.capture.aten.exchange_times import MOST_UNDER_WAY
from cotrain_compile.dataflow import Collective, Role
from cotrain_compile.entry.tracing import trace
from cotrain_compile.errors import CaptureError
from cotrain_compile.graph.collectives import is_collective, is_wait
from cotrain_compile.machine import MEMORIES
from cotrain_compile.placement.problem import formulate
from cotrain_compile.placement.search.solve import SolveSettings, solve
from cotrain_compile.plan import Lane
from cotrain_compile.presets import find
from tests.support.fake_ranks import ranks

ALL_REDUCE = "_c10d_functional.all_reduce.default"
X = torch.ones(4, 4)
Ways = Callable[[Any, torch.optim.Optimizer], Callable[[torch.Tensor], Any]]


def plain(ddp: Any, optimizer: torch.optim.Optimizer) -> Callable[[torch.Tensor], Any]:
    def step(x: torch.Tensor) -> None:
        optimizer.zero_grad()
        F.mse_loss(ddp(x), x).backward()
        nn.utils.clip_grad_norm_(ddp.parameters(), 1.0)
        optimizer.step()

    return step


def two_batches(ddp: Any, optimizer: torch.optim.Optimizer) -> Callable[[torch.Tensor], Any]:
    def step(x: torch.Tensor) -> None:
        optimizer.zero_grad()
        for _ in range(2):
            F.mse_loss(ddp(x), x).backward()
        optimizer.step()

    return step


def clipped_between(ddp: Any, optimizer: torch.optim.Optimizer) -> Callable[[torch.Tensor], Any]:
    def step(x: torch.Tensor) -> None:
        optimizer.zero_grad()
        for _ in range(2):
            F.mse_loss(ddp(x), x).backward()
            nn.utils.clip_grad_norm_(ddp.parameters(), 1.0)
        optimizer.step()

    return step


def quiet(ddp: Any, optimizer: torch.optim.Optimizer) -> Callable[[torch.Tensor], Any]:
    def step(x: torch.Tensor) -> None:
        optimizer.zero_grad()
        with ddp.no_sync():
            F.mse_loss(ddp(x), x).backward()
        F.mse_loss(ddp(x), x).backward()
        optimizer.step()

    return step


def compiled(ways: Ways, model: nn.Module, *, options: Any = None, **of_ddp: Any) -> Any:
    ddp = DistributedDataParallel(model, **of_ddp)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    step: Any = torch.compile(
        ways(ddp, optimizer), backend="cotrain", options={"quiet": True, **(options or {})}
    )
    return ddp, step


def collectives(step: Any) -> list[fx.Node]:
    return [node for node in cotrain_compile.inspect(step).graph.nodes if is_collective(node)]


@pytest.fixture(autouse=True)
def one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """No buckets: they are the story of `test_buckets.py`."""
    monkeypatch.setattr(bucket_exchanges, "SMALL_BYTES", 0)


@pytest.mark.parametrize(
    ("ways", "times"),
    [(two_batches, 1), (quiet, 1), (clipped_between, 2)],
    ids=["two batches", "quiet", "clipped between"],
)
def test_gradients_are_reduced_once_unless_they_are_used_between(ways: Ways, times: int) -> None:
    with ranks(4):
        _, step = compiled(ways, nn.Linear(4, 4))
        step(X)
        found = collectives(step)
    assert [str(node.target) for node in found] == [ALL_REDUCE] * 2 * times


def test_clipping_sees_the_mean_and_buffers_are_those_of_the_first_rank() -> None:
    with ranks(4):
        _, step = compiled(plain, nn.Sequential(nn.Linear(4, 4, bias=False), nn.BatchNorm1d(4)))
        step(X)
        graph = cotrain_compile.inspect(step).graph
    norms = [n for n in graph.nodes if n.target is torch.ops.aten.linalg_vector_norm.default]
    of_gradients = [node for node in norms if is_wait(node.all_input_nodes[0])]
    assert len(of_gradients) == 3
    reduced = [node for node in collectives(step) if "reduce" in str(node.target)]
    parts = [node.all_input_nodes[0] for node in reduced]
    assert {part.args[1] for part in parts} == {1 / 4}
    assert sum("broadcast" in str(node.target) for node in collectives(step)) == 3

    # A wait is in the memory of its collective, and no update takes either along.
    dataflow = cotrain_compile.inspect(step).problem.dataflow
    waits = [op for op in dataflow.ops if "wait_tensor" in op.target]
    assert all(op.writes == op.reads and len(op.writes) == 1 for op in waits)
    updates = {name for group in dataflow.updates for name in group.ops}
    assert len(dataflow.updates) == 3
    assert updates.isdisjoint(op.name for op in dataflow.ops if "c10d" in op.target)

    # Under Inductor each runs alone, in its place.
    whole = segments_of(graph, graph, dataflow)
    exchanged = [node for node in whole.step.nodes if is_collective(node) or is_wait(node)]
    assert len(exchanged) == 2 * len(collectives(step))
    inside = [node for part in whole.segments.values() for node in part.module.graph.nodes]
    assert not any(is_collective(node) or is_wait(node) for node in inside)

    (order,) = [buffer for buffer in dataflow.buffers if buffer.role is Role.GROUP]
    assert sum(order.name in op.writes for op in dataflow.ops) == len(collectives(step))


def test_micro_batches_of_several_calls_are_reduced_in_the_last() -> None:
    def micro_batch(ddp: Any, optimizer: torch.optim.Optimizer) -> Callable[..., Any]:
        def step(x: torch.Tensor) -> None:
            F.mse_loss(ddp(x), x).backward()

        return step

    with ranks(2):
        ddp, step = compiled(micro_batch, nn.Linear(4, 4), options={"keep_grads": True})
        with ddp.no_sync(), pytest.warns(UserWarning, match="exchanges nothing"):
            step(X)
        assert collectives(step) == []
        step(X)
        assert len(collectives(step)) == 2


def test_one_rank_alone_exchanges_nothing() -> None:
    with ranks(1):
        _, step = compiled(plain, nn.BatchNorm1d(4))
        step(X)
        assert collectives(step) == []


def hooked(ddp: DistributedDataParallel) -> None:
    ddp.register_comm_hook(None, allreduce_hook)


def joined(ddp: DistributedDataParallel) -> None:
    """As it is within the context that `join()` returns."""
    ddp._join_config = ddp._join_config._replace(enable=True)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        (hooked, "a communication hook is registered"),
        (joined, r"within DistributedDataParallel\.join\(\)"),
    ],
)
def test_what_a_captured_step_cannot_do_is_refused(
    changed: Callable[[Any], None], message: str
) -> None:
    with ranks(2):
        ddp, step = compiled(plain, nn.Linear(4, 4))
        changed(ddp)
        before = ddp.module.weight.detach().clone()
        with pytest.raises(CaptureError, match=message):
            step(X)
    assert torch.equal(ddp.module.weight, before)


def test_the_device_goes_on_while_a_few_means_are_under_way() -> None:
    layers = nn.Sequential(*(nn.Linear(4, 4, bias=False) for _ in range(7)))
    with ranks(2):
        _, step = compiled(plain, layers)
        step(X)
        nodes = list(cotrain_compile.inspect(step).graph.nodes)
    order = {node: place for place, node in enumerate(nodes)}
    most, under_way = 0, set[fx.Node]()
    for node in nodes:
        if is_collective(node):
            under_way.add(node)
        elif is_wait(node):
            under_way.remove(node.all_input_nodes[0])
            assert order[node] < min(map(order.__getitem__, node.users))
        most = max(most, len(under_way))
    assert most == MOST_UNDER_WAY
    products = {order[node] for node in nodes if node.target is torch.ops.aten.mm.default}
    assert any(
        order[n] < at < order[next(iter(n.users))]
        for at in products
        for n in nodes
        if is_collective(n)
    )


def test_the_step_of_many_ranks_is_traced_and_predicted_by_one_process() -> None:
    def build() -> tuple[Callable[..., Any], tuple[Any, ...]]:
        ddp = DistributedDataParallel(nn.Linear(1024, 1024, bias=False))
        return plain(ddp, torch.optim.SGD(ddp.parameters(), lr=0.1)), (torch.ones(8, 1024),)

    dataflow = trace(build, ranks=64)
    assert not torch.distributed.is_initialized()
    (exchange,) = [op.collective for op in dataflow.ops if op.collective is not None]
    assert exchange == Collective("all_reduce", 64, 4 << 20)
    machine = find("rtx4090 network=1GB")
    plan = solve(
        formulate(dataflow, machine, dict.fromkeys(MEMORIES, 1 << 34)),
        SolveSettings(policy="resident"),
    )
    assert plan.predicted.busy_s(Lane.NETWORK) == pytest.approx(126 * (4 << 20) / 64 / 1e9 + 126e-5)

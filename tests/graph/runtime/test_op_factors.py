"""Op factors: a device on which each kind of op takes a known time has the factors that say so."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, fx
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map

from cotrain_compile.extract.op_costs import cost_of, kind_of_op
from cotrain_compile.machine import Link, TierSpec
from cotrain_compile.machine.op_classes import FUSED, ONE_BY_ONE, RELAYOUT, OpKind
from cotrain_compile.presets import PRESETS
from cotrain_compile.presets.factors import CONSTANTS
from cotrain_compile.runtime.calibrate.link_bench import Copies, Sizes
from cotrain_compile.runtime.calibrate.op_factors import factors_of

TINY = Sizes(matmul_side=16, until_s=0.0)
KNOWN: dict[str, float] = {
    OpKind.PRODUCT: 1.25,
    OpKind.BATCHED_PRODUCT: 1.5,
    OpKind.ATTENTION: 2.5,
    OpKind.ATTENTION_BACKWARD: 3.0,
    OpKind.MASKED_ATTENTION: 3.25,
    OpKind.MASKED_ATTENTION_BACKWARD: 3.5,
    OpKind.CONVOLUTION: 1.75,
    OpKind.CHANNELS_LAST: 1.75,
    OpKind.DEPTHWISE: 4.0,
    ONE_BY_ONE: 1.375,
    RELAYOUT: 2.0,
}


class Clock(TorchDispatchMode):
    """Adds up what the ops that it sees take, by what a traced step would say of each."""

    def __init__(self, tier: TierSpec) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.tier, self.seconds = tier, 0.0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if not func.is_view:
            self.seconds += self._seconds(_as_node(func, args, kwargs or {}, out))
        return out

    def _seconds(self, node: fx.Node) -> float:
        cost = cost_of(node)
        kind = kind_of_op(node, cost.flops)
        assert cost.is_known
        bytes_s = cost.bytes_moved / self.tier.bytes_per_s
        roofline_s = max(cost.flops / self.tier.flops_per_s["bfloat16"], bytes_s)
        seconds = KNOWN[kind if cost.flops else ONE_BY_ONE] * roofline_s
        if kind is OpKind.CONVOLUTION:
            seconds += KNOWN[RELAYOUT] * bytes_s
        return float(seconds)


class KnownBench:
    """A device whose ops take `KNOWN` times what its rates allow."""

    capacity_bytes, name = 1 << 30, "known"

    def __init__(self, tier: TierSpec) -> None:
        self.tier = tier

    def seconds(self, work: Callable[[], object]) -> float:
        clock = Clock(self.tier)
        with clock:
            work()
        return clock.seconds

    def copies(self, sizes: Sizes) -> Copies:
        return Copies(Link(1.0, 1.0), Link(1.0, 1.0), 1.0)

    def copying(self, nbytes: int) -> nullcontext[None]:
        return nullcontext()


@pytest.mark.parametrize(
    "flops_a_byte", [0.01, *(pytest.param(n, marks=pytest.mark.long) for n in (30.0, 1e6))]
)
def test_what_each_kind_of_op_takes_is_found(flops_a_byte: float) -> None:
    """Whether the flops limit all of them, some, or none: the work is counted as in a step."""
    tier = TierSpec(1 << 30, 1e9, {"bfloat16": flops_a_byte * 1e9}, 1e-12)
    found = factors_of(KnownBench(tier), tier, torch.device("cpu"), TINY)
    assert not found.remarks
    by_kind = dict(found.by_kind)
    assert by_kind.pop(FUSED) == CONSTANTS["memory, fused"]
    assert by_kind.keys() == KNOWN.keys()
    assert by_kind == pytest.approx(KNOWN, rel=0.03)


def test_a_layout_that_costs_nothing_has_no_factor(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(KNOWN, RELAYOUT, 0.0)
    tier = TierSpec(1 << 30, 1e9, {"bfloat16": 1e11}, 1e-12)
    found = factors_of(KnownBench(tier), tier, torch.device("cpu"), TINY).by_kind
    assert RELAYOUT not in found
    assert min(found.values()) > 1


class FaultyBench(KnownBench):
    """One that is wrong about some calls: `fault` gives what to report for a call and its truth."""

    def __init__(self, tier: TierSpec, fault: Callable[[int, float], float]) -> None:
        super().__init__(tier)
        self.fault, self.calls = fault, 0

    def seconds(self, work: Callable[[], object]) -> float:
        self.calls += 1
        return self.fault(self.calls, super().seconds(work))


TIER = TierSpec(1 << 30, 1e9, {"bfloat16": 1e11}, 1e-12)


def test_what_a_first_call_loads_and_chooses_is_in_no_factor() -> None:
    bench = FaultyBench(TIER, lambda call, taken_s: taken_s + (100.0 if call % 2 else 0.0))
    found = factors_of(bench, TIER, torch.device("cpu"), TINY)
    assert found == factors_of(KnownBench(TIER), TIER, torch.device("cpu"), TINY)


@pytest.mark.parametrize(
    "fault",
    [
        pytest.param(lambda call, taken_s: 0.0, marks=pytest.mark.long),
        pytest.param(lambda call, taken_s: 100.0, marks=pytest.mark.long),
        pytest.param(lambda call, taken_s: 1600 * taken_s, marks=pytest.mark.long),
        lambda call, taken_s: (0.0, 1600 * taken_s)[call // 2 % 2],
        lambda call, taken_s: float("nan"),
        pytest.param(lambda call, taken_s: float("inf"), marks=pytest.mark.long),
    ],
    ids=["zeros", "constant", "times too long", "in turn", "no number", "without end"],
)
def test_what_no_device_can_take_is_assumed_and_told(
    fault: Callable[[int, float], float],
) -> None:
    bench = FaultyBench(TIER, fault)
    bench.name, bench.capacity_bytes = "NVIDIA H200", 150_109_880_320
    tier = replace(TIER, capacity_bytes=bench.capacity_bytes)
    found = factors_of(bench, tier, torch.device("cpu"), TINY)
    assumed = PRESETS["h200"].device.factors
    told = {remark.partition(":")[0] for remark in found.remarks}
    assert told
    assert all("no device takes" in remark and "is assumed" in remark for remark in found.remarks)
    assert {kind: found.by_kind[kind] for kind in told} == {kind: assumed[kind] for kind in told}
    replace(tier, factors=found.by_kind)  # a machine may have them


def test_a_card_that_nobody_knows_is_assumed_as_of_no_family() -> None:
    found = factors_of(
        FaultyBench(TIER, lambda call, taken_s: 0.0), TIER, torch.device("cpu"), TINY
    )
    assert found.by_kind[OpKind.ATTENTION] == CONSTANTS["attention"]


def _as_node(func: Any, args: Any, kwargs: Any, out: Any) -> fx.Node:
    """The call as a node of a graph, with its tensors as values."""
    graph = fx.Graph()

    def given(value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        node = graph.placeholder("given")
        node.meta["val"] = value
        return node

    node = graph.call_function(func, tree_map(given, args), tree_map(given, kwargs))
    node.meta["val"] = out
    return node

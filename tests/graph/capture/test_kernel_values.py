"""Traced values are what the kernels make: dtype, sizes, bytes of storage, and whose memory."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._pytree import tree_leaves

from cotrain_compile.backends.inductor.program import _as_read
from cotrain_compile.capture.aten.fake_values import use_kernel_values
from cotrain_compile.errors import LoweringError
from cotrain_compile.graph import StepGraph
from cotrain_compile.options import Options
from tests.support.fuzz.fuzz_layers import LAYERS
from tests.support.fuzz.fuzz_run import train
from tests.support.fuzz.fuzz_specs import LoopSpec, ModelSpec, OptimizerSpec, Spec
from tests.support.steps import Step, compiling_with, cotrain


class Comparing(fx.Interpreter):
    """Runs a graph and notes every node whose value is not what the trace says."""

    def __init__(self, module: fx.GraphModule) -> None:
        super().__init__(module)
        self.differences: list[str] = []

    def run_node(self, n: fx.Node) -> Any:
        args, kwargs = self.fetch_args_kwargs_from_env(n)
        given = storages(tree_leaves((args, kwargs)))
        value = super().run_node(n)
        if n.op == "call_function":
            traced = [leaf for source in n.all_input_nodes for leaf in leaves(source)]
            found = [described(leaf, given) for leaf in tree_leaves(value)]
            expected = [described(leaf, storages(traced)) for leaf in leaves(n)]
            if found != expected:
                self.differences.append(f"{n} ({n.target}) is {found}, {expected} in the trace")
        return value


def leaves(node: fx.Node) -> list[Any]:
    return list(tree_leaves(node.meta.get("val")))


def storages(values: Sequence[Any]) -> set[int]:
    return {v.untyped_storage()._cdata for v in values if isinstance(v, Tensor)}


def described(value: Any, given: set[int]) -> tuple[Any, ...] | None:
    """What memory a tensor shows; whether it is that of one of the op's inputs."""
    if not isinstance(value, Tensor):
        return None
    storage = value.untyped_storage()
    is_view = storage._cdata in given and storage.nbytes() > 0
    return value.dtype, value.shape, value.stride(), storage.nbytes(), is_view


def differences_in(spec: Spec) -> list[str]:
    """Where values of the captured step of `spec` are not as traced."""
    found: list[str] = []

    def run_compared(step: StepGraph, values: Sequence[Any], options: Options) -> Step:
        def run_graph(inputs: list[Any]) -> Any:
            comparing = Comparing(step.module)
            with torch.no_grad():
                results = comparing.run(*inputs)
            found.extend(comparing.differences)
            return results

        return run_graph

    with compiling_with(run_compared):
        train(spec, cotrain(remat=spec.options.get("remat", False)))
    return found


# Many layers a trace: what takes time is to trace.
MODELS = [tuple(sorted(LAYERS)[first::3]) for first in range(3)]


@pytest.mark.parametrize("kinds", MODELS, ids=range(3))
@pytest.mark.parametrize(
    ("autocast", "remat"),
    [
        (True, True),
        *(pytest.param(*each, marks=pytest.mark.long) for each in ((False, False), (True, False))),
    ],
)
def test_traced_values_are_those_of_the_kernels(
    kinds: tuple[str, ...], autocast: bool, remat: bool
) -> None:
    spec = Spec(
        0,
        ModelSpec(kinds, dtype="float32"),
        OptimizerSpec("SGD"),
        LoopSpec((4,), autocast=autocast),
        {"remat": remat},
    )
    assert differences_in(spec) == []


# Compiled segments beside ops that run as they are.


def norm_step() -> Step:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 32), nn.LayerNorm(32), nn.Linear(32, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(x: Tensor, y: Tensor) -> Tensor:
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        return loss.detach()

    return step


def losses(step: Step) -> list[float]:
    torch._dynamo.reset()
    generator = torch.Generator().manual_seed(1)
    x, y = torch.randn(8, 16, generator=generator), torch.arange(8) % 4
    return [float(step(x, y)) for _ in range(4)]


@pytest.mark.long  # compiles C++; the traced values above are those of every run
@pytest.mark.parametrize("eager", ["1:0", "1:1"])
def test_a_norm_in_eager_beside_compiled_segments(eager: str) -> None:
    """Either half of it: statistics are float32 in memory, however Inductor makes a norm."""
    mixed = cotrain(lowering="inductor", eager_segments=[eager])(norm_step())
    assert losses(mixed) == pytest.approx(losses(norm_step()), rel=1e-2)


@pytest.fixture
def op_with_a_wrong_fake() -> Iterator[torch._ops.OpOverload]:
    """Makes float64, and says float32."""
    with torch.library._scoped_library("cotrain_test", "FRAGMENT") as library:
        library.define("widened(Tensor x) -> Tensor")
        library.impl("widened", lambda x: x.double(), "CPU")
        library.impl("widened", torch.empty_like, "Meta")
        yield torch.ops.cotrain_test.widened.default


def test_an_op_whose_fake_kernel_is_wrong_is_refused(
    op_with_a_wrong_fake: torch._ops.OpOverload,
) -> None:
    """Compiled code would read its memory as something else, without an error."""
    weight = nn.Parameter(torch.ones(8))
    optimizer = torch.optim.SGD([weight], lr=0.1)

    def step(x: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss: Tensor = (weight * op_with_a_wrong_fake(x)).relu().sum()
        loss.backward()
        optimizer.step()
        return loss.detach()

    torch._dynamo.reset()
    compiled = cotrain(lowering="inductor", eager_segments=["outside:0"])(step)
    with pytest.raises(LoweringError, match=r"float64.*told the trace torch\.float32"):
        compiled(torch.ones(8))
    assert torch.equal(weight, torch.ones(8))


def test_what_is_on_another_device_than_traced_is_refused_but_for_scalars_of_the_host() -> None:
    """Code for the CPU would follow the address of a card's memory."""
    here, there = torch.empty(2), torch.empty(2, device="meta")
    assert _as_read(here, there) != _as_read(there, here)
    here, there = torch.empty(()), torch.empty((), device="meta")
    assert _as_read(here, there) == _as_read(there, here)


@pytest.mark.parametrize("other", [torch.ones(4, 6).t(), torch.ones(6, 5), torch.ones(1, 6, 4)])
def test_other_shapes_and_strides_than_traced_are_told_apart(other: Tensor) -> None:
    """But for strides that nothing steps over."""
    traced = torch.ones(6, 4)
    assert _as_read(traced, other) != _as_read(other, traced)
    one = torch.ones(6, 1)
    assert _as_read(one, one.t().contiguous().t()) == _as_read(one.t().contiguous().t(), one)


def test_a_copy_into_an_input_of_symbolic_size_keeps_its_value() -> None:
    copied = make_fx(torch.ops.aten.copy.default, tracing_mode="symbolic")
    graph = copied(torch.zeros(4), torch.ones(4)).graph
    (node,) = graph.find_nodes(op="call_function", target=torch.ops.aten.copy.default)
    traced = node.meta["val"]
    use_kernel_values(graph)
    assert node.meta["val"] is traced

"""A placed step draws the random numbers of eager, and leaves the generators as eager does.

Steps of two layers, with plain momentum, whose numbers are eager's in every bit.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

import cotrain_compile
from cotrain_compile import passes
from cotrain_compile.backends.inductor.compile_graph import compile_graph
from cotrain_compile.dataflow import Role
from cotrain_compile.errors import PlanError
from cotrain_compile.extract.extract import extract
from cotrain_compile.graph import StepGraph
from cotrain_compile.graph.random_ops import generators_of, is_random
from cotrain_compile.machine import MEMORIES
from cotrain_compile.options import Options
from cotrain_compile.passes import run_passes
from cotrain_compile.passes.find_accesses import find_race_in
from cotrain_compile.placement.policies import coarse
from cotrain_compile.placement.problem import formulate
from cotrain_compile.placement.schedule.schedule import schedule
from cotrain_compile.plan import Plan
from cotrain_compile.presets import find
from cotrain_compile.runtime.ops import host_region
from tests.support.steps import compiling_with

aten = torch.ops.aten
Edit = Callable[[nn.Module], None]


def noise(model: nn.Module) -> None:
    for param in model.parameters():
        assert param.grad is not None
        param.grad.add_(torch.randn_like(param.grad), alpha=0.1)


def private(model: nn.Module) -> None:
    """Clips, then adds noise that is as large as a gradient may be."""
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    with torch.no_grad():
        for param in model.parameters():
            assert param.grad is not None
            param.grad = param.grad + torch.normal(0.0, 0.1, param.shape, dtype=param.dtype)


def mask(model: nn.Module) -> None:
    for param in model.parameters():
        assert param.grad is not None
        param.grad.mul_(torch.bernoulli(torch.full_like(param, 0.5)))


def nothing_reads_it(model: nn.Module) -> None:
    torch.rand(2)
    noise(model)
    torch.rand(3)


@torch.no_grad()
def langevin(model: nn.Module) -> None:
    for param in model.parameters():
        param.add_(torch.randn_like(param), alpha=0.01)


def nothing(model: nn.Module) -> None:
    pass


# What a step does between `backward` and `step`, and what behind it.
STEPS: dict[str, tuple[Edit, Edit]] = {
    "gradient noise": (noise, nothing),
    "private": (private, nothing),
    "mask": (mask, nothing),
    "unread": (nothing_reads_it, nothing),
    "langevin": (nothing, langevin),
    "both": (noise, langevin),
}


def step_of(name: str) -> tuple[Callable[..., Any], Callable[[], list[Tensor]]]:
    """A step of a named kind, and what it has trained so far."""
    before, behind = STEPS[name]
    torch.manual_seed(0)
    layers = (nn.Linear(6, 32), nn.ReLU(), nn.Dropout(0.3), nn.Linear(32, 4))
    model = nn.Sequential(*layers).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

    def step(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        before(model)
        optimizer.step()
        behind(model)
        with torch.no_grad():  # draws once more, behind the update
            return loss, F.cross_entropy(model(x), y)

    def trained() -> list[Tensor]:
        momenta = [state["momentum_buffer"] for state in optimizer.state.values()]
        return [*model.parameters(), *momenta]

    return step, trained


def batches(count: int) -> list[tuple[Tensor, Tensor]]:
    return [(torch.randn(5, 6).double(), torch.arange(5) % 4) for _ in range(count)]


def left_by(run: Any, trained: Callable[[], list[Tensor]]) -> list[Tensor]:
    """What three steps leave: losses, parameters, states and the generator's state."""
    torch.manual_seed(1)
    losses = [loss for batch in batches(3) for loss in run(*batch)]
    cotrain_compile.synchronize()
    return [*losses, *trained(), torch.get_rng_state()]


def captured(**options: Any) -> dict[str, Any]:
    return {"host_kernels": "captured", **options}


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("gradient noise", captured(policy="zero-offload")),
        ("private", captured(policy="coarse", overlap_steps=True)),
        pytest.param("mask", captured(policy="fraction:0.6", remat=True), marks=pytest.mark.long),
        ("unread", captured(policy="coarse", verify=2)),
        pytest.param(
            "langevin", captured(policy="coarse", overlap_steps=True), marks=pytest.mark.long
        ),
        ("both", captured(policy="streamed")),
    ],
)
def test_updates_that_move_leave_random_numbers_in_order(
    name: str, options: dict[str, Any]
) -> None:
    step, trained = step_of(name)
    placed = torch.compile(step, backend="cotrain", options={"quiet": True, **options})
    found = left_by(placed, trained)
    plan = cotrain_compile.inspect(placed).plan
    assert {*plan.placement.updates.values()} - {"resident"}
    assert all(torch.equal(a, b) for a, b in zip(left_by(*step_of(name)), found, strict=True))


@pytest.fixture(scope="module")
def noisy() -> tuple[StepGraph, Plan]:
    """A step with dropout and noise on its gradients, and the plan for all updates on the host."""
    steps: list[StepGraph] = []

    def keep(step: StepGraph, values: Sequence[Any], options: Options) -> Callable[..., Any]:
        steps.append(step)
        return lambda inputs: torch.no_grad()(step.module)(*inputs)

    with compiling_with(keep):
        torch.compile(step_of("gradient noise")[0], backend="cotrain")(*batches(1)[0])
    dataflow = extract(steps[0])
    problem = formulate(dataflow, find("h100"), dict.fromkeys(MEMORIES, 1 << 40))
    return steps[0], schedule(problem, coarse(dataflow))


def test_a_random_op_reads_and_writes_its_generator(noisy: tuple[StepGraph, Plan]) -> None:
    dataflow = extract(noisy[0])
    (generator,) = [b.name for b in dataflow.buffers if b.role is Role.RNG]
    drawing = [op for op in dataflow.ops if generator in op.reads]
    assert generator == "generator.cpu"
    assert len(drawing) == 6  # the dropout of two forwards, and noise for four parameters
    assert all(generator in op.writes for op in drawing)
    for group in dataflow.updates:  # what crosses the link is the gradient with its noise
        (made,) = [op for op in dataflow.ops if group.gradient in op.writes]
        assert made.target == "aten.add.Tensor"


def test_a_pass_that_moves_a_random_op_is_caught(
    noisy: tuple[StepGraph, Plan], monkeypatch: pytest.MonkeyPatch
) -> None:
    def swaps(step: StepGraph, plan: Plan) -> StepGraph:
        drawing = [node for node in step.nodes if node.target is aten.randn.default]
        drawing[0].prepend(drawing[-1])
        return step

    monkeypatch.setattr(passes, "PASSES", (swaps,))
    with pytest.raises(
        PlanError, match=r"swaps puts random op or collective .* draw other numbers"
    ):
        run_passes(*noisy)


def test_a_host_region_that_draws_races_with_the_device(noisy: tuple[StepGraph, Plan]) -> None:
    placed = run_passes(*noisy)
    assert find_race_in(placed) is None
    first = placed.module.graph.find_nodes(op="call_function", target=host_region)[0]
    region: Any = placed.module.get_submodule(str(first.args[0].target))
    place = region.graph.find_nodes(op="output")[0]
    with region.graph.inserting_before(place):
        drawn = region.graph.call_function(aten.randn.default, ([2],))
    drawn.meta["val"] = torch.empty(2)
    assert generators_of(first) == ("cpu",)
    race = find_race_in(placed)
    assert race is not None
    assert race.buffer == "generator.cpu"


@pytest.mark.parametrize("dropout", [0.0, 0.1])
def test_attention_is_random_where_it_drops_something(dropout: float) -> None:
    def attend(x: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(x, x, x, dropout_p=dropout)

    graph = make_fx(attend)(torch.randn(1, 1, 4, 8)).graph
    assert any(map(is_random, graph.nodes)) is (dropout > 0)


def test_noise_like_a_tensor_is_that_of_its_shape() -> None:
    """What `take_shapes_alone` relies on."""
    like = torch.empty(33, 7, dtype=torch.float64)
    pairs: list[tuple[Callable[..., Tensor], Callable[..., Tensor], tuple[int, ...]]] = [
        (torch.randn_like, torch.randn, ()),
        (torch.rand_like, torch.rand, ()),
        (torch.randint_like, torch.randint, (9,)),
    ]
    for make_like, make, taken in pairs:
        torch.manual_seed(0)
        expected = make_like(like, *taken)
        torch.manual_seed(0)
        assert torch.equal(make(*taken, like.shape, dtype=like.dtype), expected)


def test_a_factor_of_a_sum_with_a_product_is_compiled() -> None:
    """Inductor makes `addmm` of the sum, and forgets the factor."""

    def noisy_product(a: Tensor, b: Tensor, c: Tensor) -> list[Tensor]:
        return [torch.add(a @ b, c, alpha=0.1), torch.add(c, (a @ b).t(), alpha=0.1)]

    given = [torch.randn(4, 4) for _ in range(3)]
    with FakeTensorMode():
        fakes = [torch.empty(4, 4) for _ in given]
    traced: fx.GraphModule = make_fx(noisy_product)(*given)
    found = compile_graph(traced, fakes, {})(list(given))
    for a, b in zip(noisy_product(*given), found, strict=True):
        assert torch.allclose(a, b)

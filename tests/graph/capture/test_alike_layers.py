"""Of layers that are alike a few are lowered, and the graph is that of lowering them all."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._functorch._aot_autograd.autograd_cache import AOTAutogradCache

from cotrain_compile.backends import devices
from cotrain_compile.capture.dynamo import alike_accumulations, alike_updates, patches
from cotrain_compile.capture.dynamo.copied_calls import TracedCall
from cotrain_compile.capture.layers import lower
from cotrain_compile.capture.layers.extend import extend
from cotrain_compile.capture.layers.few_updates import put_updates_back
from cotrain_compile.entry.tracing import trace_graph
from cotrain_compile.graph import StepGraph
from tests.support import alike_updates as alike_updates_of
from tests.support.alike_layers import (
    ALIKE,
    DIFFERENT,
    LAYERS,
    MIDDLE,
    WIDTH,
    Build,
    Layer,
    Model,
    job,
    plain,
    sgd,
)
from tests.support.same_graphs import described
from tests.support.steps import cotrain

pytestmark = pytest.mark.skipif(
    not torch.__version__.startswith(lower.TRIED), reason="layers are put together on torch 2.13"
)


@pytest.fixture
def left_out(monkeypatch: pytest.MonkeyPatch) -> list[range]:
    """The layers that were put in after lowering, once the graph of the others repeated itself."""
    found: list[range] = []

    def noted(module: Any, short: Any) -> None:
        extend(module, short)
        found.append(short.left_out)

    monkeypatch.setattr(lower, "extend", noted)
    return found


@pytest.fixture
def put_back(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The parameters whose updates were put in after lowering."""
    found: list[str] = []

    def noted(module: Any, few: Any) -> None:
        put_updates_back(module, few)
        found.extend(name for kind in few.kinds for name in kind.left_out)

    monkeypatch.setattr(lower, "put_updates_back", noted)
    return found


def both(build: Build, monkeypatch: pytest.MonkeyPatch) -> tuple[list[Any], list[Any]]:
    """The graphs of lowering few layers and of lowering all, with each update traced."""
    few = anonymous(trace_graph(build))
    with monkeypatch.context() as patch:
        patch.setattr(lower, "_parts", lambda *_: [])
        patch.setattr(patches, "traced_once_a_kind", lambda *_: None)
        patch.setattr(alike_updates, "_are_one_group", lambda *_: False)
        patch.setattr(patches, "accumulated_once_a_kind", nullcontext)
        patch.setattr(patches, "parameters_walked", lambda: iter(()))
        return few, anonymous(trace_graph(build))


def anonymous(step: StepGraph) -> list[Any]:
    """What can be told of a graph, with numbers for the names of its nodes but those of inputs."""
    names = {node.name: f"%{i}" for i, node in enumerate(step.module.graph.nodes)}
    nodes = [(names[name], *rest) for name, *rest in described(step.module)]
    # Keys of the stacks of modules are the ids of these; checkpoints are counted in a process.
    written = [re.sub(r"\d{12,}(@\d+)?", "", repr(node)) for node in nodes]
    checkpoints: dict[str, int] = {}
    written = [
        re.sub(
            r"(ac_graph_id\W+)(\d+)",
            lambda m: f"{m[1]}{checkpoints.setdefault(m[2], len(checkpoints))}",
            text,
        )
        for text in written
    ]
    numbered = [re.sub(r"%(\w+)", lambda m: names.get(m[1], m[0]), text) for text in written]
    phases = [names[name] for name in step.phases], list(step.phases.values())
    return [numbered, *phases, [item.node for item in step.inputs]]


def some(names: Iterable[str], cheap: Iterable[str]) -> list[Any]:
    """All of `names`, of which only `cheap` ones belong to the short run."""
    return [pytest.param(n, marks=() if n in cheap else pytest.mark.long) for n in names]


@pytest.mark.parametrize("name", some(ALIKE, ["checkpoints"]))
def test_the_graph_is_that_of_lowering_all_layers(
    name: str, left_out: list[range], put_back: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    build, expected = ALIKE[name]
    few, whole = both(build, monkeypatch)
    assert few == whole
    assert left_out == expected
    assert put_back


@pytest.mark.parametrize("name", some(DIFFERENT, ["hook"]))
def test_a_layer_that_differs_is_lowered(
    name: str, left_out: list[range], monkeypatch: pytest.MonkeyPatch
) -> None:
    few, whole = both(DIFFERENT[name], monkeypatch)
    assert few == whole
    assert all(MIDDLE not in layers for layers in left_out)


@pytest.fixture
def copied(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """For each update that was not traced, how many tensors it has."""
    return copies_noted(alike_updates, monkeypatch)


def copies_noted(of: Any, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """For each copy that a module makes of what was traced, of how many tensors."""
    found: list[int] = []

    class Noted(TracedCall):
        def copy_for(self, inputs: Sequence[Any]) -> dict[Any, Any]:
            found.append(len(inputs))
            return super().copy_for(inputs)

    monkeypatch.setattr(of, "TracedCall", Noted)
    return found


@pytest.mark.long  # those of SGD with momentum are in every run
def test_updates_of_parameters_that_look_alike_are_traced_once(
    copied: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    few, whole = both(
        job(lambda: Model([*plain(2), Layer(8)]), lambda m: torch.optim.AdamW(m.parameters())),
        monkeypatch,
    )
    assert few == whole
    assert copied == [5, 5]  # the second weight and the second bias: with gradient and three states


@pytest.mark.parametrize(
    ("batches", "copies"), [pytest.param(1, 8, marks=pytest.mark.long), (2, 8)]
)
def test_first_gradients_of_leaves_that_look_alike_are_traced_once(
    batches: int, copies: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of four weights and four biases more; what is added to a gradient is traced."""
    stored = copies_noted(alike_accumulations, monkeypatch)

    def build() -> Any:
        model, batch = Model(plain(5)), torch.ones(2, WIDTH)
        optimizer = torch.optim.SGD(model.parameters())

        def step(batch: Tensor) -> None:
            optimizer.zero_grad()
            for _ in range(batches):
                model(batch).sum().backward()
            optimizer.step()

        return step, (batch,)

    few, whole = both(build, monkeypatch)
    assert few == whole
    assert stored == [2] * copies


OPTIMIZERS: dict[str, Callable[[nn.Module], torch.optim.Optimizer]] = {
    "SGD": sgd,
    "momentum": lambda m: torch.optim.SGD(m.parameters(), momentum=0.9, nesterov=True),
    "AMSGrad": lambda m: torch.optim.AdamW(m.parameters(), amsgrad=True),
    "RMSprop": lambda m: torch.optim.RMSprop(m.parameters(), momentum=0.9, centered=True),
    "Adagrad": lambda m: torch.optim.Adagrad(m.parameters()),
    "Adadelta": lambda m: torch.optim.Adadelta(m.parameters()),
    "Adamax": lambda m: torch.optim.Adamax(m.parameters()),
    "NAdam": lambda m: torch.optim.NAdam(m.parameters()),
    "RAdam": lambda m: torch.optim.RAdam(m.parameters()),
    "ASGD": lambda m: torch.optim.ASGD(m.parameters()),
    "Rprop": lambda m: torch.optim.Rprop(m.parameters()),
    "scheduled": lambda m: scheduled(torch.optim.AdamW(m.parameters())),
}


def scheduled(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """With a rate that is an input of the graph."""
    schedules.append(torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (step + 1)))
    return optimizer


schedules: list[object] = []  # alive as long as the steps


@pytest.mark.parametrize("name", some(OPTIMIZERS, ["momentum"]))
def test_updates_of_any_optimizer_are_traced_once_a_kind(
    name: str, copied: list[int], put_back: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    few, whole = both(job(lambda: Model(plain(5)), OPTIMIZERS[name]), monkeypatch)
    assert few == whole
    assert len(copied) == 8  # of four weights and four biases
    both_kinds = {f"layers.{i}.linear.{kind}" for i in (2, 3, 4) for kind in ("bias", "weight")}
    others = {
        "scheduled": {"layers.2.linear.weight"},  # the first update makes the rates
        "Rprop": both_kinds,  # has constants that are tensors
    }
    assert {*put_back} == both_kinds - others.get(name, set())


@pytest.mark.parametrize("name", some(alike_updates_of.ALIKE, ["clipping"]))
def test_updates_that_are_alike_are_lowered_once_a_kind(
    name: str, put_back: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    few, whole = both(alike_updates_of.ALIKE[name], monkeypatch)
    assert few == whole
    behind = range(2, alike_updates_of.COUNT)
    both_kinds = [f"layers.{i}.linear.{kind}" for i in behind for kind in ("bias", "weight")]
    assert sorted(put_back) == both_kinds


@pytest.mark.parametrize("name", some(alike_updates_of.DIFFERENT, ["rate"]))
def test_an_update_that_differs_is_lowered(
    name: str, put_back: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    few, whole = both(alike_updates_of.DIFFERENT[name], monkeypatch)
    assert few == whole
    assert f"layers.{alike_updates_of.ODD}.linear.weight" not in put_back


@pytest.mark.parametrize(
    "optimizer",
    [
        lambda m: torch.optim.Adafactor(m.parameters()),  # reads numbers out of its tensors
        lambda m: torch.optim.Adam(m.parameters(), lr=torch.tensor(0.1)),
    ],
    ids=["numbers of a tensor", "a rate that is a tensor"],
)
@pytest.mark.long
def test_an_update_that_asks_for_more_is_traced(
    optimizer: Any, copied: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    few, whole = both(job(lambda: Model(plain(3)), optimizer), monkeypatch)
    assert few == whole
    assert not copied


def test_layers_are_put_together_under_a_schedule(
    left_out: list[range], monkeypatch: pytest.MonkeyPatch
) -> None:
    few, whole = both(job(lambda: Model(plain()), OPTIMIZERS["scheduled"]), monkeypatch)
    assert few == whole
    assert left_out == [range(4, LAYERS - 2)]  # the rates of the first have no layer before


def test_the_states_behind_one_that_is_dropped_have_the_sizes_that_they_have() -> None:
    """A first trace has states of the first parameter, too, which gets no gradient."""

    def trained(compile_with: Callable[[Any], Any]) -> dict[str, Tensor]:
        torch.manual_seed(0)
        unused, model = nn.Bilinear(2, 2, 2, bias=False), Model(plain(3))
        optimizer = torch.optim.AdamW([*unused.parameters(), *model.parameters()], lr=0.1)

        def step(x: Tensor) -> None:
            optimizer.zero_grad()
            model(x).square().mean().backward()
            optimizer.step()

        run = compile_with(step)
        for _ in range(2):
            run(torch.ones(2, WIDTH))
        assert len(optimizer.state) == len([*model.parameters()])
        return model.state_dict()

    torch._dynamo.reset()
    found = trained(cotrain(policy="resident"))
    torch.testing.assert_close(found, trained(lambda step: step))


@pytest.mark.long
def test_every_second_layer_may_be_of_another_kind(
    left_out: list[range], monkeypatch: pytest.MonkeyPatch
) -> None:
    few, whole = both(job(lambda: Model([Layer(4 + 4 * (i % 2)) for i in range(16)])), monkeypatch)
    assert few == whole
    assert left_out == [range(3, 6)]


class Measured(Layer):
    """It divides by a number that hangs on data."""

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x)
        divided: Tensor = y / (1.0 + y.detach().abs().max().item())
        return x + divided


def test_layers_with_numbers_that_hang_on_data_are_told_apart(left_out: list[range]) -> None:
    """Nobody can say that two such numbers are equal."""
    step = trace_graph(job(lambda: Model([Measured() for _ in range(LAYERS)])))
    assert not left_out
    assert sum(node.target is torch.ops.aten.max.default for node in step.nodes) == LAYERS


def llama(reentrant: bool) -> Any:
    """A small model of Hugging Face's, whose layers are in checkpoints."""
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=LAYERS,
        num_attention_heads=2,
        vocab_size=32,
        use_cache=False,
    )
    model: Any = transformers.LlamaForCausalLM(config).train()
    name = "activation_checkpointing_enable"
    enable = getattr(model, name, model.gradient_checkpointing_enable)
    enable({"use_reentrant": reentrant})
    return model


@pytest.mark.long
@pytest.mark.parametrize("reentrant", [False, True])
def test_layers_of_hugging_face_in_checkpoints_are_lowered_once(
    reentrant: bool, left_out: list[range], monkeypatch: pytest.MonkeyPatch
) -> None:
    def build() -> tuple[Callable[..., Any], tuple[Any, ...]]:
        model = llama(reentrant)
        optimizer = sgd(model)

        def step(ids: Tensor) -> Tensor:
            optimizer.zero_grad()
            loss: Tensor = model(input_ids=ids, labels=ids).loss
            loss.backward()
            optimizer.step()
            return loss

        return step, (torch.zeros(1, 4, dtype=torch.int64),)

    few, whole = both(build, monkeypatch)
    assert few == whole
    assert left_out == [range(3, LAYERS - 2)]


def trained(step_of: Callable[[Any], Any]) -> tuple[list[Tensor], list[int]]:
    """Two steps of a model of alike layers: its parameters, and how often each was written."""
    torch.manual_seed(0)
    model = Model(plain())
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)

    def step(x: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss: Tensor = model(x).square().mean()
        loss.backward()
        optimizer.step()
        return loss.detach()

    run = step_of(step)
    for seed in range(2):
        run(torch.full((2, WIDTH), 1.0 + seed))
    parameters = list(model.parameters())
    return [p.detach().clone() for p in parameters], [p._version for p in parameters]


def test_a_step_trains_as_in_eager_and_says_what_it_has_written(
    left_out: list[range], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COTRAIN_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(devices, "measured_machine", lambda device: None)  # would take a second
    monkeypatch.setattr(AOTAutogradCache, "_get_tmp_dir", lambda: str(tmp_path / "torch"))
    eager, _ = trained(lambda step: step)
    compile_step = cotrain(policy="resident", lowering="eager")
    versions = []
    ways: tuple[Any, ...] = (lower._parts, lower._parts, lambda *_: [])
    for parts in ways:  # the second is found on disk
        monkeypatch.setattr(lower, "_parts", parts)
        torch._dynamo.reset()
        found, written = trained(compile_step)
        torch.testing.assert_close(found, eager)
        versions.append(written)
    assert versions[0] == versions[1] == versions[2]
    assert left_out == [range(3, LAYERS - 2)]


def test_few_layers_are_lowered_as_they_are(left_out: list[range]) -> None:
    trace_graph(job(partial(Model, plain(6))))
    assert not left_out

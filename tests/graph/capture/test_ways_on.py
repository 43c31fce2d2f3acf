"""The advice of a refusal works: each step is refused, then follows the advice, and trains."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from traceback import FrameSummary
from typing import Any

import numpy as np
import pytest
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from lightning_fabric import Fabric
from torch import Tensor, nn
from torch.torch_version import TorchVersion

from cotrain_compile.capture.dynamo.ways_on import way_on
from cotrain_compile.errors import CaptureError
from tests.support.steps import make_llama

pytestmark = [
    pytest.mark.filterwarnings("ignore:Dynamo detected a call to a `functools.lru_cache`"),
    pytest.mark.filterwarnings("ignore:Dynamo does not know how to trace the builtin"),
    pytest.mark.filterwarnings("ignore:.*pin_memory.*:UserWarning"),
    pytest.mark.filterwarnings("ignore:.*gradient_checkpointing.* is deprecated"),
]


def train(parameters: Any, loss_of: Callable[[], Tensor]) -> None:
    optimizer = torch.optim.SGD(parameters, lr=0.1)

    def step() -> Tensor:
        optimizer.zero_grad()
        loss = loss_of()
        loss.backward()
        optimizer.step()
        return loss.detach()

    losses(step)


def losses(step: Callable[[], Tensor]) -> None:
    """Two steps, after which the loss is lower."""
    run = torch.compile(step, backend="cotrain", options={"quiet": True})
    first = run()
    assert run() < first


def test_a_causal_mask_is_said_to_be_one() -> None:
    layer = nn.TransformerEncoderLayer(8, 2, 8, dropout=0.0, batch_first=True)
    model = nn.TransformerEncoder(layer, 1)
    mask = nn.Transformer.generate_square_subsequent_mask(3)
    x = torch.randn(2, 3, 8)
    with pytest.raises(CaptureError, match=r"is_causal=True \(or False\) to an encoder, tgt_is_c"):
        train(model.parameters(), lambda: (model(x, mask=mask)[..., 0] - 3).square().mean())
    train(
        model.parameters(),
        lambda: (model(x, mask=mask, is_causal=True)[..., 0] - 3).square().mean(),
    )


@pytest.mark.long  # adapters on such a model, below, are trained so in every run
def test_gradient_checkpointing_of_hugging_face_has_no_cache() -> None:
    model = make_llama()
    model.config.use_cache = True  # type: ignore[union-attr]
    model.gradient_checkpointing_enable()  # type: ignore[operator]
    x = torch.randint(1, 32, (1, 4))
    train(model.parameters(), lambda: model(input_ids=x, labels=x).loss)  # and warns of the cache


def test_accelerate_gets_its_recipe() -> None:
    AcceleratorState._reset_state(reset_partial_state=True)
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    model = nn.Linear(4, 2)
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    x = torch.randn(2, 4)

    def accumulating() -> Tensor:
        with accelerator.accumulate(model):
            loss: Tensor = model(x).square().mean()
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
        return loss.detach()

    with pytest.raises(CaptureError, match=r"with accelerator.accumulate.* around the call"):
        losses(accumulating)


def test_fabric_gets_its_recipe() -> None:
    fabric = Fabric(accelerator="cpu", devices=1)
    model = nn.Linear(4, 2)
    model, optimizer = fabric.setup(model, torch.optim.SGD(model.parameters(), lr=0.1))
    x = torch.randn(2, 4)

    def clipping(**settings: Any) -> Callable[[], Tensor]:
        def step() -> Tensor:
            with fabric.autocast():
                loss: Tensor = model.module(x).square().mean()
            fabric.backward(loss)
            fabric.clip_gradients(model, optimizer, max_norm=1.0, **settings)
            optimizer.step()
            optimizer.zero_grad()
            return loss.detach()

        return step

    with pytest.raises(CaptureError, match=r"fabric.clip_gradients.*error_if_nonfinite=False"):
        losses(clipping())
    losses(clipping(error_if_nonfinite=False))


def test_hooks_that_transformers_installs_under_a_lock_are_there_after_a_first_call() -> None:
    from transformers import MixtralConfig, MixtralForCausalLM

    model = MixtralForCausalLM(
        MixtralConfig(
            vocab_size=32,
            hidden_size=8,
            intermediate_size=8,
            num_hidden_layers=1,
            num_attention_heads=1,
            num_key_value_heads=1,
            num_local_experts=2,
            use_cache=False,
            output_router_logits=True,
        )
    )
    x = torch.randint(1, 32, (1, 4))
    with pytest.raises(CaptureError, match=r"Call the model once before, in eager"):
        train(model.parameters(), lambda: model(input_ids=x, labels=x).loss)
    with torch.no_grad():
        model(input_ids=x)
    train(model.parameters(), lambda: model(input_ids=x, labels=x).loss)


@pytest.mark.parametrize(
    "draw",
    [
        lambda: random.uniform(0, 1),
        random.Random(3).random,
        lambda: torch.from_numpy(np.random.rand(1)),
        lambda: np.random.default_rng(3).random(),
        np.random.RandomState(3).rand,
        *(
            pytest.param(draw, marks=pytest.mark.long)
            for draw in (
                lambda: random.random(),
                lambda: random.Random().random(),
                np.random.default_rng(3).random,
                lambda: np.random.RandomState(3).rand(),
            )
        ),
    ],
)
def test_numbers_that_python_or_numpy_draw_are_drawn_by_torch_instead(
    draw: Callable[[], Any],
) -> None:
    layer, x = nn.Linear(2, 1), torch.ones(3, 2)
    with pytest.raises(CaptureError, match=r"[Dd]raw the numbers with torch .*torch\.rand\(\(\)"):
        train(layer.parameters(), lambda: (layer(x) - 3 - draw()).square().mean())
    train(layer.parameters(), lambda: (layer(x) - 9 - torch.rand(())).square().mean())


def test_noise_of_a_generator_of_its_own_becomes_torchs_own() -> None:
    layer, x, own = nn.Linear(2, 1), torch.ones(3, 2), torch.Generator().manual_seed(3)

    def loss(noise: Callable[[], Tensor]) -> Tensor:
        value: Tensor = (layer(x + noise() / 100) - 9).square().mean()
        return value

    with pytest.raises(CaptureError, match="Leave out generator=, "):
        train(layer.parameters(), lambda: loss(lambda: torch.randn(3, 2, generator=own)))
    train(layer.parameters(), lambda: loss(lambda: torch.randn(3, 2)))


def test_what_an_iterator_gives_is_passed_in() -> None:
    layer, goals = nn.Linear(2, 1), iter([9.0, 9.0, 9.0])
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)

    def step(goal: float) -> Tensor:
        optimizer.zero_grad()
        loss: Tensor = (layer(torch.ones(3, 2)) - goal).square().mean()
        loss.backward()
        optimizer.step()
        return loss.detach()

    with pytest.raises(CaptureError, match=r"Call next\(\) outside the step"):
        losses(lambda: step(next(goals)))
    run = torch.compile(step, backend="cotrain", options={"quiet": True})
    first = run(next(goals))
    assert run(next(goals)) < first


def test_what_a_step_sets_on_a_function_is_kept_in_a_dictionary() -> None:
    layer, count = nn.Linear(2, 1), {"calls": 0}

    def loss() -> Tensor:
        loss.calls = 1  # type: ignore[attr-defined]
        value: Tensor = (layer(torch.ones(3, 2)) - 9).square().mean()
        return value

    def counted() -> Tensor:
        count["calls"] += 1
        value: Tensor = (layer(torch.ones(3, 2)) - 9).square().mean()
        return value

    with pytest.raises(CaptureError, match="Keep what the step sets in a global, a dictionary"):
        train(layer.parameters(), loss)
    train(layer.parameters(), counted)
    assert count["calls"] == 2


def test_a_full_backward_hook_becomes_one_of_what_the_module_returns() -> None:
    layer, x = nn.Linear(2, 1), torch.ones(3, 2)
    hook = layer.register_full_backward_hook(lambda module, inputs, outputs: None)
    with pytest.raises(CaptureError, match=r"h = module\(x\), then h.register_hook"):
        train(layer.parameters(), lambda: (layer(x) - 3).square().mean())
    hook.remove()

    def hooked() -> Tensor:
        h = layer(x)
        h.register_hook(lambda gradient: gradient / 2)
        loss: Tensor = (h - 3).square().mean()
        return loss

    train(layer.parameters(), hooked)


def test_parameters_from_a_vector_are_copied() -> None:
    layer, x = nn.Linear(2, 1), torch.ones(3, 2)
    params = list(layer.parameters())

    def assigned() -> Tensor:
        vector = nn.utils.parameters_to_vector(params) * 0.99
        nn.utils.vector_to_parameters(vector, params)
        loss: Tensor = (layer(x) - 3).square().mean()
        return loss

    def copied() -> Tensor:
        with torch.no_grad():
            vector = nn.utils.parameters_to_vector(params) * 0.99
        for p, part in zip(params, vector.split([p.numel() for p in params])):  # noqa: B905
            p.data.copy_(part.view_as(p))
        loss: Tensor = (layer(x) - 3).square().mean()
        return loss

    with pytest.raises(CaptureError, match=r"in place of vector_to_parameters"):
        train(params, assigned)
    train(params, copied)


def test_a_sparse_layer_becomes_a_dense_one() -> None:
    words = torch.tensor([0, 2])
    sparse = nn.Embedding(4, 2, sparse=True)
    with pytest.raises(CaptureError, match="make the layer with sparse=False"):
        train(sparse.parameters(), lambda: sparse(words).square().mean())
    layer = nn.Embedding(4, 2)
    train(layer.parameters(), lambda: layer(words).square().mean())


@pytest.mark.parametrize(
    ("path", "what", "way"),
    [
        ("/site-packages/lightning/pytorch/core/module.py", "a method", "loss.backward() in place"),
        ("/site-packages/lightning/fabric/fabric.py", "a method", "error_if_nonfinite=False"),
        ("/site-packages/trl/kernels/chunked_logprob.py", "out=", "Trainer.compute_loss`"),
        ("/site-packages/torch/nn/utils/clip_grad.py", "data-dependent", "error_if_nonfinite"),
        ("/site-packages/some/library.py", "builtin `print`", "Move the print out"),
        ("/home/me/train.py", "function `LRScheduler.step`", "outside the step, after it"),
        ("/site-packages/accelerate/scheduler.py", "`LRScheduler.step`", "Call scheduler.step() o"),
        ("/home/me/train.py", "function `save_on_cpu.__init__`", "Leave out the hooks on saved"),
        ("/home/me/train.py", "function `detect_anomaly.__init__`", "with the step in eager"),
        ("/home/me/train.py", "the builtin `time.time.`", "Read the clock outside"),
        ("/home/me/train.py", "Tensor.tolist() with", "Index the tensor"),
    ],
)
def test_where_the_graph_broke_says_more_than_how(path: str, what: str, way: str) -> None:
    assert way in str(way_on([FrameSummary(path, 1, "f", line="")], what))


def test_what_an_older_torch_cannot_trace_is_called_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "__version__", TorchVersion("2.11.0+cpu"))
    accelerate = [FrameSummary("/site-packages/accelerate/utils/imports.py", 1, "f", line="")]
    what = "the function `find_spec` in file `<frozen importlib.util>` should not be traced"
    assert str(way_on(accelerate, what)).startswith("torch 2.11.0+cpu cannot trace this, and 2.13")
    monkeypatch.setattr(torch, "__version__", TorchVersion("2.13.0+cpu"))
    assert "accelerator.accumulate" in str(way_on(accelerate, what))


@pytest.mark.parametrize(
    ("line", "says"),
    [
        (
            lambda y: 1 if y.item() > 0 else 2,
            "it decides by the value of a tensor.* Decide outside",
        ),
        (lambda y: np.save("y", y.detach().numpy()), r"NumPy's .* on what the step returns"),
    ],
)
def test_what_dynamo_says_in_its_own_words_is_said_in_ours(
    line: Callable[[Tensor], Any], says: str
) -> None:
    layer = nn.Linear(2, 1)

    def loss() -> Tensor:
        y: Tensor = layer(torch.ones(3, 2)).square().mean()
        line(y)
        return y

    with pytest.raises(CaptureError, match=f"captured as one graph: .*{says}"):
        train(layer.parameters(), loss)


def test_a_model_that_was_compiled_in_place_of_a_step_is_named() -> None:
    model = torch.compile(nn.Sequential(nn.Linear(2, 1)), backend="cotrain")
    with pytest.raises(CaptureError, match=r"^the model that was given to torch.compile: the step"):
        model(torch.ones(3, 2))


def test_a_model_that_looks_at_its_labels_is_known_by_its_source(tmp_path: Path) -> None:
    library = tmp_path / "modeling.py"
    library.write_text("if labels.max() >= 3:\n    raise ValueError\n")
    frame = FrameSummary(str(library), 1, "forward")
    said = way_on([frame], "Data-dependent branching")
    assert said is not None
    assert said.startswith("Leave out the labels")


def test_lora_with_gradient_checkpointing_trains() -> None:
    peft = pytest.importorskip("peft")
    model = make_llama()
    model.config.use_cache = True  # type: ignore[union-attr]
    model.gradient_checkpointing_enable()  # type: ignore[operator]
    model = peft.get_peft_model(model, peft.LoraConfig(r=2, target_modules=["q_proj", "v_proj"]))
    adapters = [param for param in model.parameters() if param.requires_grad]
    x = torch.randint(1, 32, (2, 8))
    train(adapters, lambda: model(input_ids=x, labels=x).loss)


def test_dora_of_peft_trains_as_in_eager() -> None:
    """It asks for the module of a weight's class."""
    peft = pytest.importorskip("peft")

    def adapters(compiled: bool) -> list[Tensor]:
        torch.manual_seed(0)
        config = peft.LoraConfig(r=2, target_modules=["0"], use_dora=True, init_lora_weights=False)
        model = peft.get_peft_model(nn.Sequential(nn.Linear(4, 6), nn.GELU()), config)
        trained = [param for param in model.parameters() if param.requires_grad]
        optimizer = torch.optim.SGD(trained, lr=0.1)
        x = torch.randn(3, 4)

        def step() -> None:
            model(x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()

        options: dict[str, Any] = {"policy": "resident", "quiet": True}
        run = torch.compile(step, backend="cotrain", options=options) if compiled else step
        for _ in range(2):
            run()
        return trained

    torch.testing.assert_close(adapters(True), adapters(False))


@pytest.mark.parametrize("package", ["pytorch_lightning", "lightning/pytorch"])
def test_lightning_gets_its_recipe_under_both_of_its_names(package: str) -> None:
    """Its manual_backward logs, which is what Dynamo stops at."""
    stack = [FrameSummary(f"/site-packages/{package}/trainer/call.py", 210, "_call_callback_hooks")]
    told = way_on(stack, "logging.Logger method not supported for non-export cases")
    assert told is not None
    assert "in place of manual_backward()" in told


def test_the_way_on_for_a_covariance_is_to_write_it_out() -> None:
    what = "Data dependent operator (Operator `aten.equal.default` has a non-Tensor output)"
    told = way_on([], what, "train.py:3 in loss: `torch.cov(out.T).triu(1)`")
    assert told is not None
    assert "off @ off.T" in told


def test_a_flat_buffer_is_refused_and_trained_through_its_views() -> None:
    torch.manual_seed(0)
    model, x = nn.Linear(3, 2), torch.randn(4, 3)
    sizes = {name: param.shape for name, param in model.named_parameters()}
    flat = nn.utils.parameters_to_vector(model.parameters()).detach()
    gradient = torch.zeros_like(flat)

    def views(of: Tensor) -> dict[str, Tensor]:
        parts = of.split([size.numel() for size in sizes.values()])
        return {n: part.view(size) for part, (n, size) in zip(parts, sizes.items(), strict=True)}

    for (name, shown), grad in zip(views(flat).items(), views(gradient).values(), strict=True):
        param = model.get_parameter(name)
        param.data, param.grad = shown, grad

    def step() -> None:
        gradient.zero_()
        model(x).square().mean().backward()
        flat.sub_(gradient, alpha=0.1)

    with pytest.raises(CaptureError, match=r"one flat buffer.*torch.func.functional_call"):
        torch.compile(step, backend="cotrain")()
    whole = nn.Parameter(flat.clone())
    train([whole], lambda: torch.func.functional_call(model, views(whole), (x,)).square().mean())

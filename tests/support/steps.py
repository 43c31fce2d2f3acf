"""Training steps for tests: small models, optimizers, and the step function that joins them.

A `Case` is a model with a batch; an optimizer maker turns a model into optimizers; `train` runs
steps and returns all that training changes, so that two runs can be compared tensor by tensor.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn
from torch.optim import Optimizer

import cotrain_compile
from cotrain_compile.dataflow import Dataflow
from cotrain_compile.entry import compile_step as pipeline
from cotrain_compile.entry.planner import Planner
from cotrain_compile.graph import StepGraph
from cotrain_compile.machine import Tier
from cotrain_compile.options import Options
from cotrain_compile.runtime.task_nodes import start_of

Step = Callable[..., Any]
Batch = tuple[Tensor, ...]
MakeOptimizers = Callable[[nn.Module], list[Optimizer]]

SEED = 7
VOCABULARY = 32


# The models.


class TinyConvNet(nn.Module):
    """Two convolutions with BatchNorm and a skip connection."""

    def __init__(self) -> None:
        super().__init__()
        # A bias in front of BatchNorm has no gradient but rounding, which Adam makes large.
        self.first = nn.Conv2d(3, 8, 3, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(8)
        self.second = nn.Conv2d(8, 8, 3, padding=1)
        self.head = nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.norm(self.first(x)))
        x = x + F.relu(self.second(x))
        return self.head(x.mean((2, 3)))  # type: ignore[no-any-return]


class TinyCharLm(nn.Module):
    """A character model whose embedding and output layer are one tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, 16)
        self.hidden = nn.Linear(16, 16)
        self.head = nn.Linear(16, VOCABULARY, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(torch.tanh(self.hidden(self.embedding(tokens))))  # type: ignore[no-any-return]


def make_mlp() -> nn.Module:
    return nn.Sequential(
        nn.Linear(12, 24), nn.LayerNorm(24), nn.GELU(), nn.Dropout(0.1), nn.Linear(24, 4)
    )


def make_frozen_mlp() -> nn.Module:
    model = make_mlp()
    model[0].requires_grad_(False)  # type: ignore[index]
    return model


def make_llama() -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=VOCABULARY,
            hidden_size=16,
            intermediate_size=32,
            num_hidden_layers=2,
            num_attention_heads=2,
            num_key_value_heads=1,
            max_position_embeddings=16,
            use_cache=False,
        )
    )


def make_gpt2() -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    return GPT2LMHeadModel(
        GPT2Config(
            vocab_size=VOCABULARY,
            n_positions=16,
            n_embd=16,
            n_layer=1,
            n_head=2,
            bos_token_id=0,
            eos_token_id=0,
            use_cache=False,
        )
    )


def make_bert() -> nn.Module:
    from transformers import BertConfig, BertForMaskedLM

    model = BertForMaskedLM(
        BertConfig(
            vocab_size=VOCABULARY,
            hidden_size=16,
            num_hidden_layers=1,
            num_attention_heads=2,
            intermediate_size=32,
            max_position_embeddings=16,
        )
    )
    # The bias of the keys has no gradient but rounding. From zero, Adam would scale that up.
    for name, bias in model.named_parameters():
        if name.endswith("bias"):
            nn.init.normal_(bias, std=0.02)
    return model


def make_t5() -> nn.Module:
    from transformers import T5Config, T5ForConditionalGeneration

    config = T5Config(
        vocab_size=VOCABULARY,
        d_model=16,
        d_kv=8,
        d_ff=32,
        num_layers=1,
        num_heads=2,
        use_cache=False,
    )
    config.decoder_start_token_id = 0
    return T5ForConditionalGeneration(config)


# A model with its batches and its loss.


def vectors() -> Batch:
    return torch.randn(8, 12), torch.randint(0, 4, (8,))


def images() -> Batch:
    return torch.randn(4, 3, 6, 6), torch.randint(0, 4, (4,))


def tokens() -> Batch:
    return torch.randint(1, VOCABULARY, (2, 8)), torch.randint(1, VOCABULARY, (2, 8))


def cross_entropy(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(model(x), y)


def token_cross_entropy(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(model(x).flatten(0, 1), y.flatten())


def logits_cross_entropy(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    """Cross entropy computed here, from the logits of a Hugging Face model."""
    return F.cross_entropy(model(input_ids=x).logits.flatten(0, 1), y.flatten())


def labels_loss(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    """The loss that a Hugging Face model computes itself."""
    return model(input_ids=x, labels=y).loss  # type: ignore[no-any-return]


@dataclass(frozen=True)
class Case:
    make_model: Callable[[], nn.Module]
    make_batch: Callable[[], Batch]
    loss_of: Callable[..., Tensor]


def in_float64(case: Case) -> Case:
    """The same model with the same start and batches, in double precision."""

    def make_batch() -> Batch:
        return tuple(t.double() if t.is_floating_point() else t for t in case.make_batch())

    return Case(lambda: case.make_model().double(), make_batch, case.loss_of)


CASES = {
    "mlp": Case(make_mlp, vectors, cross_entropy),
    "frozen": Case(make_frozen_mlp, vectors, cross_entropy),
    "conv": Case(TinyConvNet, images, cross_entropy),
    "tied": Case(TinyCharLm, tokens, token_cross_entropy),
    "llama": Case(make_llama, tokens, labels_loss),
    "gpt2": Case(make_gpt2, tokens, logits_cross_entropy),
    "bert": Case(make_bert, tokens, labels_loss),
    "t5": Case(make_t5, tokens, labels_loss),
}


# The optimizers. `foreach=False` is what a captured step runs: one op per parameter.


def one(optimizer: type[Optimizer], **settings: Any) -> MakeOptimizers:
    """Makes one optimizer of this class for all parameters of a model."""

    def make(model: nn.Module) -> list[Optimizer]:
        trained = [p for p in model.parameters() if p.requires_grad]
        return [optimizer(trained, foreach=False, **settings)]  # type: ignore[call-arg]

    return make


def muon_and_sgd(model: nn.Module) -> list[Optimizer]:
    """Muon for matrices, as it is defined for them only, and SGD for the rest."""
    trained = [p for p in model.parameters() if p.requires_grad]
    matrices = [p for p in trained if p.ndim == 2]
    rest = [p for p in trained if p.ndim != 2]
    return [torch.optim.Muon(matrices, lr=0.02), torch.optim.SGD(rest, lr=0.05, foreach=False)]


def adamw_in_two_groups(model: nn.Module) -> list[Optimizer]:
    """Weight decay and a higher rate for matrices only."""
    trained = [p for p in model.parameters() if p.requires_grad]
    groups = [
        {"params": [p for p in trained if p.ndim >= 2], "weight_decay": 0.1, "lr": 2e-3},
        {"params": [p for p in trained if p.ndim < 2], "weight_decay": 0.0},
    ]
    return [torch.optim.AdamW(groups, lr=1e-3, foreach=False)]


OPTIMIZERS: dict[str, MakeOptimizers] = {
    "adamw": one(torch.optim.AdamW, lr=1e-3),
    "adamw-groups": adamw_in_two_groups,
    "adam": one(torch.optim.Adam, lr=1e-3, weight_decay=0.01, amsgrad=True),
    "sgd": one(torch.optim.SGD, lr=0.05, momentum=0.9, weight_decay=0.01),
    "rmsprop": one(torch.optim.RMSprop, lr=1e-3, momentum=0.9),
    "adagrad": one(torch.optim.Adagrad, lr=0.01),
    "nadam": one(torch.optim.NAdam, lr=1e-3),
    "adafactor": one(torch.optim.Adafactor, lr=0.01),
    "muon": muon_and_sgd,
}


# A run.


def make_step(
    model: nn.Module, optimizers: Sequence[Optimizer], loss_of: Callable[..., Tensor]
) -> Step:
    """The step most tests run: clear, forward, backward, clip, update."""

    def step(*batch: Tensor) -> Tensor:
        for optimizer in optimizers:
            optimizer.zero_grad()
        loss = loss_of(model, *batch)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimizer in optimizers:
            optimizer.step()
        return loss

    return step


@dataclass
class Run:
    """What training left behind: losses, and every tensor of model and optimizers by name."""

    losses: list[Tensor] = field(default_factory=list)
    tensors: dict[str, Tensor] = field(default_factory=dict)


def train(
    case: Case,
    make_optimizers: MakeOptimizers,
    compile_with: Callable[[Step], Step] = lambda step: step,
    after_step: Callable[[Step], None] = lambda step: None,
    steps: int = 10,
) -> Run:
    """Train from a fixed seed with the step that `compile_with` makes of the plain one."""
    torch.manual_seed(SEED)
    model = case.make_model().train()
    batches = [case.make_batch() for _ in range(steps)]
    optimizers = make_optimizers(model)
    step = compile_with(make_step(model, optimizers, case.loss_of))
    run = Run()
    for batch in batches:
        run.losses.append(step(*batch).detach())
        after_step(step)
    run.tensors = all_tensors(model, optimizers)
    return run


def train_placed(case: Case, make_optimizers: MakeOptimizers, **options: Any) -> Run:
    """Train through our backend, checking the device's memory after every step."""
    return train(case, make_optimizers, cotrain(**options), check_peak)


def train_unplaced(case: Case, make_optimizers: MakeOptimizers) -> Run:
    """Train with the captured graph as it is: no plan, no passes, no runtime."""

    def run_as_captured(step: StepGraph, values: Sequence[Any], options: Options) -> Step:
        def run(inputs: list[Any]) -> Any:
            with torch.no_grad():
                return step.module(*inputs)

        return run

    with compiling_with(run_as_captured):
        return train(case, make_optimizers, cotrain())


def _first_only(compile_within: Callable[..., Any], inputs: Sequence[Any], **_: Any) -> Any:
    """In place of `AfterDryRun`: what is compiled first."""
    return compile_within(None, inputs, {})


@contextmanager
def compiling_with(compile_step: Callable[..., Any]) -> Iterator[None]:
    """Within it, `compile_step(step, dataflow, options)` makes what runs a captured step.

    There is no plan and no dry run.
    """

    def made(step: StepGraph, dataflow: Dataflow, planner: Planner, options: Options) -> Any:
        run = compile_step(step, dataflow, options)
        if not hasattr(run, "steps"):
            run.steps = 0  # it has no plan that another trace could use
        return run

    with (
        mock.patch.object(pipeline, "compile_step", made),
        mock.patch.object(pipeline, "AfterDryRun", _first_only),
    ):
        yield


def task_name(node: fx.Node) -> str:
    """The name of the task that `node`, which is none of an op, starts."""
    start = start_of(node)
    assert start is not None, f"{node} starts no task"
    return start.launch.task


def all_tensors(model: nn.Module, optimizers: Sequence[Optimizer]) -> dict[str, Tensor]:
    """Parameters, buffers and optimizer states by name."""
    names = {id(param): name for name, param in model.named_parameters()}
    found = dict(model.state_dict())
    for optimizer in optimizers:
        for param, state in optimizer.state.items():
            for key, value in state.items():
                found[f"{names[id(param)]}.{key}"] = torch.as_tensor(value)
    return {name: value.detach().clone() for name, value in found.items()}


def cotrain(**options: Any) -> Callable[[Step], Step]:
    """`torch.compile` with our backend and these options."""
    return lambda step: torch.compile(step, backend="cotrain", options=options)


def check_peak(step: Step) -> None:
    """The device never held more than its budget, and exactly what was predicted."""
    compiled = cotrain_compile.inspect(step)
    assert compiled.measured is not None
    peak = compiled.measured.peak_bytes[Tier.DEVICE]
    assert peak <= compiled.plan.budgets[Tier.DEVICE]
    assert peak == compiled.predicted.peak_bytes[Tier.DEVICE]

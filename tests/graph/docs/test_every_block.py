"""Every block of Python and every command of the documentation runs, here or in `ELSEWHERE`.

A page's blocks run one after the other, with what the page takes for granted (a model, its loop)
given by `GIVEN`, and what stands for a card or a large model replaced as `HERE` says. Nothing else
of them is changed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import pytorch_lightning
import torch
import torch.nn.functional as F
from accelerate import Accelerator
from torch import Tensor, nn
from torch.utils.data import DataLoader
from transformers import LlamaConfig, LlamaForCausalLM, TrainingArguments

import cotrain_compile
from cotrain_compile.graph import StepGraph
from cotrain_compile.plan import Plan
from tests.graph.docs.test_doors import run_commands
from tests.support.pages import PAGES, ROOT, commands, programs

Names = dict[str, Any]
DOORS = "tests/graph/docs/test_doors.py"
RANKS = "tests/graph/distribute/test_blocks_of_pages.py"
TASKS = "tests/graph/docs/test_task_pages.py"
# Blocks, by number, that another module runs.
ELSEWHERE = {
    "README.md": {1: TASKS},
    "docs/frameworks.md": dict.fromkeys((1, 2, 3), "tests/graph/capture/test_trl.py"),
    "docs/recipes/link.md": {0: "tests/unit/house/test_recipes.py"},
    "docs/several_cards.md": dict.fromkeys(range(2), RANKS),
    "docs/start/before-you-rent.md": {0: DOORS},
    "docs/start/less-memory.md": dict.fromkeys(range(4), DOORS),
    "docs/start/several-cards.md": {0: DOORS},
    "docs/tasks/fine-tune-7b.md": {0: TASKS},
    "docs/tasks/from-checkpointing.md": {0: TASKS},
    "docs/tasks/from-deepspeed.md": {0: TASKS},
    "docs/tasks/from-fsdp2.md": {0: TASKS, 1: RANKS},
    "docs/tasks/from-torchao.md": {0: TASKS},
    "docs/tasks/lora.md": {0: TASKS},
    "docs/training.md": dict.fromkeys(range(8), "tests/graph/capture/test_training_page.py"),
    "docs/twenty-minutes.md": dict.fromkeys(range(7), "tests/graph/docs/test_twenty_minutes.py"),
    "docs/which_way.md": dict.fromkeys(range(4), RANKS),
}
pytestmark = [
    pytest.mark.filterwarnings("ignore:.*does not have many workers"),
    pytest.mark.filterwarnings("ignore:.*`isinstance.treespec, LeafSpec.` is deprecated"),
    pytest.mark.filterwarnings("ignore:Dynamo detected a call to a `functools.lru_cache`"),
]
DEVICE = {'"device": "cuda"': '"device": "cpu"'}
CALL = "loss = step(inputs, targets)"


@dataclass(frozen=True)
class Run:
    """Blocks of Python of a page, by number, with what they take for granted, then a line of ours.

    `changes` replaces what stands for a card or a large model; each of them is on the page.
    """

    page: str
    which: tuple[int, ...]
    given: Callable[[], Names]
    then: str = ""
    changes: Mapping[str, str] = field(default_factory=dict)
    slow: bool = False


def language_model() -> LlamaForCausalLM:
    """A Llama of one layer."""
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=16,
            hidden_size=8,
            intermediate_size=8,
            num_hidden_layers=1,
            num_attention_heads=1,
            num_key_value_heads=1,
        )
    )


def loop() -> Names:
    """The model, optimizer, batch and eager step that a page speaks of."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 4))
    optimizer = torch.optim.AdamW(model.parameters())
    inputs, targets = torch.randn(4, 8), torch.tensor([0, 1, 2, 3])

    def step(inputs: Tensor, targets: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(inputs), targets)
        loss.backward()
        optimizer.step()
        return loss

    modules: Names = {"torch": torch, "nn": nn, "F": F, "cotrain_compile": cotrain_compile}
    found = {"model": model, "optimizer": optimizer, "inputs": inputs, "targets": targets}
    return {**modules, **found, "step": step, "tokens": inputs, "Model": lambda: model}


def of_tokens() -> Names:
    """As `loop`, with a step that takes one batch."""
    names = loop()
    step, targets = names["step"], names["targets"]
    return {**names, "step": lambda tokens: step(tokens, targets)}


def with_a_drive() -> Names:
    """As `loop`, with a folder for what rests on disk."""
    Path("drive").mkdir()
    return loop()


def trainer() -> Names:
    """What Hugging Face's Trainer is given."""
    args = TrainingArguments("out", max_steps=2, report_to="none", save_strategy="no", use_cpu=True)
    rows = [{"input_ids": [1, 2, 3], "labels": [1, 2, 3]}] * 16
    return {**loop(), "model": language_model(), "args": args, "data": rows}


def accelerated() -> Names:
    """What `Accelerator.prepare` returns."""
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    model = language_model()
    optimizer = torch.optim.AdamW(model.parameters())
    scheduler = torch.optim.lr_scheduler.LinearLR(optimizer)
    rows: Any = [{"input_ids": (ids := torch.arange(4)), "labels": ids}] * 8
    loader: Any = DataLoader(rows, batch_size=2)
    prepared = accelerator.prepare(model, optimizer, loader, scheduler)
    names = dict(zip(("model", "optimizer", "loader", "scheduler"), prepared, strict=True))
    return {**loop(), "accelerator": accelerator, **names}


def recipe() -> Names:
    """A recipe of torchtune's form."""
    names = loop()
    model = names["model"]
    its = SimpleNamespace(
        _model=model,
        _optimizer=names["optimizer"],
        _loss_step=lambda batch: F.cross_entropy(model(batch[0]), batch[1]),
        _gradient_accumulation_steps=2,
        _clip_grad_norm=1.0,
    )
    return {**names, "self": its}


def lightning() -> Names:
    """A module and its loader, and `self` as a module with manual optimization has it."""
    names = loop()

    class Module(pytorch_lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = names["model"]

        def training_step(self, batch: list[Tensor]) -> Tensor:
            return F.cross_entropy(self.net(batch[0]), batch[1])

        def configure_optimizers(self) -> Any:
            return torch.optim.AdamW(self.parameters())

    rows: Any = list(zip(names["inputs"], names["targets"], strict=True))
    its = SimpleNamespace(net=names["model"], loss=F.cross_entropy)
    its.optimizers = lambda: SimpleNamespace(optimizer=names["optimizer"])

    quiet = partial(pytorch_lightning.Trainer, logger=False, enable_checkpointing=False)
    quiet = partial(quiet, enable_progress_bar=False, enable_model_summary=False, accelerator="cpu")
    return {
        **names,
        "Trainer": quiet,
        "module": Module(),
        "loader": DataLoader(rows, 2),
        "self": its,
    }


def planned() -> Names:
    """The loop with its plan in a file, and what it has measured."""
    names = loop()
    options: Any = {"memory_budget": "20GiB", "quiet": True, "timeline": True, "dump": "out"}
    step = torch.compile(names["step"], backend="cotrain", options=options)
    step(names["inputs"], names["targets"])
    cotrain_compile.files.save(cotrain_compile.inspect(step).plan, "plan.json")
    inspect = cotrain_compile.inspect
    return {**names, "step": step, "inspect": inspect, "files": cotrain_compile.files}


def annotated() -> Names:
    """The types that a pass is written with."""
    return {"StepGraph": StepGraph, "Plan": Plan}


def with_an_op() -> Names:
    """A library's op that torch's registry of flops does not know."""
    torch.library.define("mylib::scan", "(Tensor values) -> Tensor")
    return {"torch": torch}


RUNS = (
    Run("README.md", (0,), loop, CALL),
    Run("README.md", (2,), trainer, "assert trainer.state.global_step == 2", slow=True),
    Run("README.md", (3,), loop, changes={**DEVICE, '.to("cuda")': '.to("cpu")'}),
    Run("README.md", (4,), planned),
    Run("docs/frameworks.md", (0,), trainer, "assert trainer.state.global_step == 2", slow=True),
    Run("docs/frameworks.md", (4,), accelerated, slow=True),
    Run("docs/frameworks.md", (5,), recipe, "step((inputs, targets), False)"),
    Run("docs/frameworks.md", (6,), lightning, "assert trainer.global_step == 4"),
    Run("docs/frameworks.md", (7,), lightning, "self.step(inputs, targets)"),
    Run("docs/offline.md", (0,), planned, CALL),
    Run("docs/options.md", (0,), loop),
    Run(
        "docs/options.md",
        (1, 2),
        of_tokens,
        changes={**DEVICE, '"cuda"': '"cpu"', "GPT()": "Model()"},
    ),
    Run("docs/options.md", (3,), planned),
    Run("docs/reading-a-plan.md", (0,), planned),
    Run("docs/recipes/add-a-pass.md", (0,), annotated),
    Run("docs/recipes/add-an-op-cost.md", (0,), with_an_op),
    Run("docs/tasks/states-on-disk.md", (0,), with_a_drive, CALL, {"/nvme/cotrain": "drive"}),
)


@pytest.mark.parametrize(
    "run",
    [
        pytest.param(
            run,
            id=f"{run.page} {run.which[0]}",
            marks=[pytest.mark.long] if run.slow else [],
        )
        for run in RUNS
    ],
)
def test_blocks_run(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    code, names = programs(ROOT / run.page), run.given()
    for there in run.changes:
        assert any(there in code[number] for number in run.which), there
    for number in run.which:
        text = code[number]
        for there, here in run.changes.items():
            text = text.replace(there, here)
        exec(compile(text, run.page, "exec"), names)
    exec(compile(run.then, run.page, "exec"), names)


JOB = """
import torch

def build():
    model = torch.nn.Linear(8, 8)
    optimizer = torch.optim.AdamW(model.parameters())

    def step(x):
        optimizer.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        return loss

    return step, (torch.randn(4, 8),)
"""


@pytest.mark.long
@pytest.mark.parametrize(
    "page", ["README.md", "docs/tasks/fine-tune-7b.md", "docs/tasks/states-on-disk.md"]
)
def test_commands_run_on_a_small_job(page: str, tmp_path: Path) -> None:
    """The job stands for a Llama of 7 billion parameters, which takes minutes."""
    (tmp_path / "job.py").write_text(JOB, encoding="utf-8")
    for block in commands(ROOT / page):
        assert "docs/examples/llama.py:llama_7b" in block
        run_commands(tmp_path, block.replace("docs/examples/llama.py:llama_7b", "job.py:build"))


@pytest.mark.long
def test_what_was_measured_goes_to_perfetto(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    page = ROOT / "docs" / "reading-a-plan.md"
    exec(programs(page)[0], planned())
    for block in commands(page):
        run_commands(tmp_path, block)
    assert Path("both.json").stat().st_size > 1000


def test_no_command_is_left_out() -> None:
    found = {str(page.relative_to(ROOT)) for page in PAGES if commands(page)}
    doors = {"docs/start/before-you-rent.md", "docs/start/several-cards.md"}
    here = {"README.md", "docs/reading-a-plan.md"}
    tasks = {"docs/tasks/fine-tune-7b.md", "docs/tasks/states-on-disk.md"}
    assert found == {*doors, *here, *tasks, "docs/several_cards.md"}


def test_no_block_of_python_is_left_out() -> None:
    for page in PAGES:
        name = str(page.relative_to(ROOT))
        here = [number for run in RUNS if run.page == name for number in run.which]
        there = ELSEWHERE.get(name, {})
        assert sorted([*here, *there]) == list(range(len(programs(page)))), name
        for module in there.values():
            assert page.name.removesuffix(".md") in (ROOT / module).read_text(encoding="utf-8")

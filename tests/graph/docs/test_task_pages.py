"""The pages that begin with a task run, with a tiny model in place of one that is downloaded.

What stands for a card, for 7 billion parameters and for long sequences is put in its place here;
all else is run as the page has it, from top to bottom.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._dynamo.utils import counters
from transformers import LlamaConfig, LlamaForCausalLM

from tests.support.pages import ROOT, after, blocks

TASKS = ROOT / "docs" / "tasks"
HERE = {'"cuda"': '"cpu"', "2048": "8"}


@pytest.fixture
def small_llama(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """The folder of a saved model, in which the page's script runs."""
    monkeypatch.chdir(tmp_path)
    config = LlamaConfig(
        vocab_size=16,
        hidden_size=8,
        intermediate_size=8,
        num_hidden_layers=1,
        num_attention_heads=1,
        num_key_value_heads=1,
    )
    LlamaForCausalLM(config).save_pretrained(tmp_path / "llama")
    return str(tmp_path / "llama")


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")
@pytest.mark.parametrize(("page", "leaves"), [("fine-tune-7b", "fine-tuned"), ("lora", "adapter")])
def test_a_model_is_fine_tuned_and_saved(page: str, leaves: str, small_llama: str) -> None:
    (script,) = blocks(TASKS / f"{page}.md", "python")
    for there, here in {**HERE, "meta-llama/Llama-2-7b-hf": small_llama}.items():
        assert there in script
        script = script.replace(there, here)
    losses: list[float] = []
    exec(compile(script, page, "exec"), {"print": losses.append})
    assert len(losses) == 3
    assert (Path(leaves)).is_dir()


def test_checkpoints_are_left_to_the_plan() -> None:
    (script,) = blocks(TASKS / "from-checkpointing.md", "python")
    losses: list[float] = []
    exec(compile(script, "from-checkpointing", "exec"), {"print": losses.append})
    assert losses == sorted(losses, reverse=True)


SLOW = pytest.mark.long  # proves again what the page before it does


@pytest.mark.parametrize(
    "page",
    ["from-deepspeed", *(pytest.param(p, marks=SLOW) for p in ("from-fsdp2", "from-torchao"))],
)
def test_what_a_migration_leaves_trains(page: str) -> None:
    first = nn.Linear(8, 8)
    model = nn.Sequential(first, nn.GELU(), nn.Linear(8, 4))
    script = after(blocks(TASKS / f"{page}.md", "diff")[0]).replace('"cuda"', '"cpu"')
    names: dict[str, Any] = {"torch": torch, "F": F, "model": model}
    names["batches"] = [(torch.randn(4, 8), torch.tensor([0, 1, 2, 3]))] * 3
    start = first.weight.detach().clone()
    exec(compile(script, page, "exec"), names)
    assert not torch.equal(first.weight, start)


def test_the_loop_of_the_readme_trains_with_a_rate_set_by_hand() -> None:
    """As nanoGPT has it: the model returns logits and loss, and the loop sets the rate."""
    weights = nn.Linear(8, 4)

    def model(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        logits = weights(x)
        return logits, F.cross_entropy(logits.float(), y)

    model.parameters = weights.parameters  # type: ignore[attr-defined]
    names: dict[str, Any] = {"torch": torch, "model": model, "grad_clip": 1.0, "iter_num": 0}
    names["optimizer"] = torch.optim.SGD(weights.parameters())
    names["get_lr"] = lambda iter_num: 0.1 / (1 + iter_num)
    names["get_batch"] = lambda split: (torch.ones(4, 8), torch.tensor([0, 1, 2, 3]))
    names |= {"gradient_accumulation_steps": 2, "device_type": "cpu"}
    names["max_iters"] = 3
    loop = after(blocks(ROOT / "README.md", "diff")[0])
    exec(compile(loop, "README.md", "exec"), names)
    assert names["loss"] < 10
    assert names["iter_num"] == 3
    assert counters["stats"]["unique_graphs"] == 1

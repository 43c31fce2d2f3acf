"""Does a long run in less memory overlay eager's? Cosine schedule, clipping, accumulation, resume.

python -m bench.training.long_run -o bench/results/long_run.json --picture docs/long-run.png
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import cotrain_compile
from bench.report import write_report
from cotrain_compile.machine import Tier

STEPS, RESUMED_AT, MICRO_BATCHES, SHARE = 300, 150, 2, 0.6
VOCABULARY, WIDTH, LENGTH, BATCH = 64, 64, 16, 8

Step = Callable[[Tensor], Tensor]


class Training:
    """A small character model on a repeating text, with all that a checkpoint holds."""

    def __init__(self, compile_with: Callable[[Step], Step]) -> None:
        torch.manual_seed(0)
        layer = nn.TransformerEncoderLayer(
            WIDTH, 4, 4 * WIDTH, dropout=0.0, batch_first=True, norm_first=True
        )
        self.model = nn.ModuleDict(
            {
                "embedding": nn.Embedding(VOCABULARY, WIDTH),
                "layers": nn.TransformerEncoder(layer, 2, enable_nested_tensor=False),
                "head": nn.Linear(WIDTH, VOCABULARY),
            }
        )
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=2e-3, foreach=False)
        self.schedule = torch.optim.lr_scheduler.CosineAnnealingLR(self.optimizer, STEPS)
        self.step = compile_with(self._step)

    def _step(self, tokens: Tensor) -> Tensor:
        total = torch.zeros(())
        mask = torch.full((LENGTH, LENGTH), float("-inf")).triu(1)
        for part in tokens.chunk(MICRO_BATCHES):
            hidden = self.model["layers"](
                self.model["embedding"](part[:, :-1]), mask, is_causal=True
            )
            logits = self.model["head"](hidden)
            loss = F.cross_entropy(logits.flatten(0, 1), part[:, 1:].flatten()) / MICRO_BATCHES
            loss.backward()
            total = total + loss.detach()
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return total

    def state_dict(self) -> dict[str, Any]:
        """All that going on needs."""
        parts = ("model", "optimizer", "schedule")
        return {name: getattr(self, name).state_dict() for name in parts}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from what `state_dict` gave."""
        for name, part in state.items():
            getattr(self, name).load_state_dict(part)


def batch(number: int) -> Tensor:
    """Sequences that count upwards in steps of 1 to 8, with one token in eight wrong."""
    generator = torch.Generator().manual_seed(number)
    start = torch.randint(0, VOCABULARY, (BATCH, 1), generator=generator)
    stride = torch.randint(1, 9, (BATCH, 1), generator=generator)
    tokens = (start + stride * torch.arange(LENGTH + 1)) % VOCABULARY
    noise = torch.randint(0, VOCABULARY, tokens.shape, generator=generator)
    return torch.where(torch.rand(tokens.shape, generator=generator) < 1 / 8, noise, tokens)


def train(compile_with: Callable[[Step], Step]) -> tuple[list[float], Training]:
    """Losses of a run that is stopped, saved and resumed in the middle by fresh objects."""
    training, losses = Training(compile_with), []
    for number in range(STEPS):
        if number == RESUMED_AT:
            training = saved_and_loaded(training, compile_with)
        losses.append(float(training.step(batch(number))))
        training.schedule.step()
    return losses, training


def saved_and_loaded(old: Training, compile_with: Callable[[Step], Step]) -> Training:
    """A new training that goes on where `old` was, by way of a file."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "checkpoint.pt"
        torch.save(old.state_dict(), path)
        new = Training(compile_with)
        new.load_state_dict(torch.load(path))
    return new


def all_resident_bytes() -> int:
    """Device bytes of the step with everything on the device."""
    training = Training(
        lambda step: torch.compile(step, backend="cotrain", options={"policy": "resident"})
    )
    training.step(batch(0))
    return int(cotrain_compile.inspect(training.step).predicted.peak_bytes[Tier.DEVICE])


def draw(path: Path, eager: list[float], ours: list[float], budget: str) -> None:
    """Both loss curves over each other, and below them how far they are apart."""
    figure, (top, bottom) = plt.subplots(
        2, 1, sharex=True, figsize=(7, 5), height_ratios=(3, 1), layout="constrained"
    )
    top.plot(eager, label="eager", color="#bbbbbb", linewidth=4)
    top.plot(ours, label=f"cotrain, {budget}", color="#1f5fa8", linewidth=1)
    top.axvline(RESUMED_AT, color="black", linestyle=":", linewidth=1)
    top.annotate("checkpoint, resume", (RESUMED_AT + 3, max(eager) * 0.9))
    top.set_ylabel("loss")
    top.legend()
    bottom.semilogy(
        [max(abs(a - b), 1e-9) for a, b in zip(eager, ours, strict=True)], color="#1f5fa8"
    )
    bottom.set_ylabel("difference")
    bottom.set_xlabel("step")
    figure.savefig(path, dpi=120)


def main() -> None:
    """Train twice, compare, draw."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("-o", "--output", type=Path, required=True)
    parser.add_argument("--picture", type=Path, required=True)
    arguments = parser.parse_args()
    resident = all_resident_bytes()
    budget = int(SHARE * resident)
    options = {"memory_budget": budget, "work_limit": 10.0}
    eager, _ = train(lambda step: step)
    ours, training = train(lambda step: torch.compile(step, backend="cotrain", options=options))
    compiled = cotrain_compile.inspect(training.step)
    assert compiled.measured is not None
    differences = [abs(a - b) for a, b in zip(eager, ours, strict=True)]
    result = {
        "steps": STEPS,
        "resumed_at": RESUMED_AT,
        "resident_bytes": resident,
        "budget_bytes": budget,
        "measured_peak_bytes": compiled.measured.peak_bytes[Tier.DEVICE],
        "largest_difference": max(differences),
        "first_and_last_loss": {"eager": [eager[0], eager[-1]], "cotrain": [ours[0], ours[-1]]},
        "losses": {"eager": eager, "cotrain": ours},
    }
    write_report(arguments.output, (__doc__ or "").splitlines()[0], result)
    draw(arguments.picture, eager, ours, f"{SHARE:.0%} of the memory")
    print({key: value for key, value in result.items() if key != "losses"})


if __name__ == "__main__":
    main()

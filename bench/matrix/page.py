"""The matrix as a page: from the JSON of `bench.matrix.matrix` to `docs/matrix.md`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

Cell = Mapping[str, Any]

HEAD = """# Loops that are captured whole

Small Hugging Face models, optimizers, and ways to write a training loop, crossed. Each cell
trains {calls} calls in eager and with `policy="{policy}"` from the same start, and compares every
loss, parameter and optimizer state. Made by `python -m bench.matrix.matrix`
([JSON](../bench/results/matrix.json)); {ran} of {all} cells were run.

**{equal} equal, {rounding} equal but for rounding that is shown below, {different} different,
{refused} refused.** Equal means: as many graphs as below, losses within {loss:g}; parameters
within {tensor:g} of the largest change of one, states within {tensor:g} of the largest of their
kind, in float64 (`GradScaler` in float32). Under bfloat16 autocast {half_loss:g} and
{half_tensor:.2g} (one update in these calls), as the rounding of one weight flips whole ulps of
activations. ViT with its own loss takes one graph more: its first forward writes
`config.problem_type`, which the second one then finds.
"""


def write_page(path: Path, summary: Mapping[str, Any]) -> None:
    """Write what `bench.matrix.matrix` found to the Markdown page at `path`."""
    cells: Sequence[Cell] = summary["cells"]
    count = Counter(cell["status"] for cell in cells)
    loss, tensor = summary["rounding"]["float64"]
    half_loss, half_tensor = summary["rounding"]["bfloat16"]
    text = HEAD.format(
        calls=summary["calls"],
        policy=summary["policy"],
        ran=len(cells),
        all=summary["cells_in_all"],
        equal=count["equal"],
        rounding=count["rounding"],
        different=count["different"],
        refused=count["refused"],
        loss=loss,
        tensor=tensor,
        half_loss=half_loss,
        half_tensor=half_tensor,
    )
    parts = [text, "## By model and idiom\n", _table(cells), _idioms(cells), _trouble(cells)]
    path.write_text("\n".join(parts).rstrip() + "\n", encoding="utf-8")


def _table(cells: Sequence[Cell]) -> str:
    """Optimizers that came out equal, by model (rows) and idiom (columns)."""
    idioms = list(dict.fromkeys(cell["idiom"] for cell in cells))
    lines = ["| | " + " | ".join(idioms) + " |", "|---|" + "---|" * len(idioms)]
    for model in sorted({cell["architecture"] for cell in cells}):
        row = [
            ", ".join(
                _mark(cell)
                for cell in cells
                if (cell["architecture"], cell["idiom"]) == (model, idiom)
            )
            for idiom in idioms
        ]
        lines.append(f"| {model} | " + " | ".join(row) + " |")
    return "\n".join(lines) + "\n"


def _mark(cell: Cell) -> str:
    name = str(cell["optimizer"])
    return name if cell["status"] == "equal" else f"**{name}: {cell['status']}**"


def _idioms(cells: Sequence[Cell]) -> str:
    lines = ["## Graphs and largest differences\n", "| idiom | graphs | loss | tensor |"]
    lines.append("|---|---|---|---|")
    for idiom in dict.fromkeys(cell["idiom"] for cell in cells):
        ran = [c for c in cells if c["idiom"] == idiom and c["status"] != "refused"]
        if ran:
            graphs = ", ".join(str(n) for n in sorted({cell["graphs"] for cell in ran}))
            loss = max(cell["loss_difference"] for cell in ran)
            tensor = max(cell["tensor_difference"] for cell in ran)
            lines.append(f"| {idiom} | {graphs} | {loss:.1e} | {tensor:.1e} |")
    return "\n".join(lines) + "\n"


_ROUNDING = """\
**Rounding**: as many graphs and losses as near as in any other cell, and one of two causes.

*The model takes another way where it is traced.* Transformers looks in eager whether a batch holds
packed sequences, which is a branch on data, and where it does not drops the mask; in a trace
(`is_tracing` in its `masking_utils.py`) it keeps it. Without a mask, heads that share keys and
values (`num_key_value_heads` below `num_attention_heads`) are summed within the attention's
kernel, with one they are repeated before it, so that their gradients round to bfloat16 before the
sum. Stock `torch.compile(backend="eager")` of the loss alone takes that way too, and then nothing
is left to explain: each such cell is within the limits above of it. That both ways are right is
seen from their gradients: where each is as near to the exact (float64) gradient as the other, they
are at most two roundings apart; a cell where they are farther counts as different. Adagrad's first
update of an element is the learning rate times the sign of its gradient, so one near zero turns a
rounding into a whole update.

*The gradient is rounding only.* A score of attention is `q · (k + b)`; `q · b` is the same for all
keys, softmax does not depend on it, so the gradient of the keys' bias `b` is zero: what a step
computes there is rounding. Adam, NAdam and Adagrad divide a gradient by its own size, and so make
whole updates of that rounding, which any other order of the same operations changes. Beside each
cell is its gradient in float64, and how far the one in its own precision is from it: a cell counts
as rounding if that has no right digit, else as different.
"""
_DIFFERENCES = """\
**Different** is not explained, and a bug until it is.
"""
_REFUSALS = """\
**Refused** is a `CaptureError` before anything has been updated. Hugging Face does not know by the
name of GPT-2's class which loss it wants, and logs a warning in its forward. The way on is in the
message: `model.loss_type = "ForCausalLM"`, with which these cells come out equal, or the loss in
the step, as in the other columns.
"""


_WHY = {"rounding": _ROUNDING, "different": _DIFFERENCES, "refused": _REFUSALS}


def _trouble(cells: Sequence[Cell]) -> str:
    odd = [cell for cell in cells if cell["status"] != "equal"]
    if not odd:
        return ""
    lines = ["## Not equal\n"]
    for status, why in _WHY.items():
        lines += [why] if any(cell["status"] == status for cell in odd) else []
    for cell in odd:
        where = f"{cell['architecture']}, {cell['optimizer']}, {cell['idiom']}"
        far = f"loss {cell['loss_difference']:.0e}, tensors {cell['tensor_difference']:.0e}: "
        said = cell["message"] if cell["status"] == "refused" else far + cell["message"]
        lines.append(f"- {where}: {cell['status']}; {said}")
    return "\n".join(lines) + "\n"

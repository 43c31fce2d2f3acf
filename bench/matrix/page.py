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
([JSON](../bench/results/matrix.json)); {ran} of {all} cells were run, and the
JSON has each.

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
    parts = [text, _idioms(cells), _trouble(cells)]
    path.write_text("\n".join(parts).rstrip() + "\n", encoding="utf-8")


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
**Rounding** has one of two causes. *The model takes another way where it is traced*: Transformers
drops a mask in eager where a batch holds no packed sequences, which is a branch on data, and keeps
it in a trace; shared heads then round to bfloat16 elsewhere. Stock `torch.compile` takes that way
too, and is equal; both gradients are as near to float64's. *The gradient is rounding only*: that
of the keys' bias is zero, and Adam, NAdam and Adagrad divide it by its own size. A cell counts as
rounding only if its gradient has no right digit beside float64's.
"""
_DIFFERENCES = """\
**Different** is not explained, and a bug until it is.
"""
_REFUSALS = """\
**Refused** is a `CaptureError` before anything has been updated: Hugging Face logs a warning in
GPT-2's forward. With `model.loss_type = "ForCausalLM"`, as the message says, these cells are equal.
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
        far = f", loss {cell['loss_difference']:.0e}, tensors {cell['tensor_difference']:.0e}"
        lines.append(f"- {where}: {cell['status']}{far if cell['status'] != 'refused' else ''}")
    return "\n".join(lines) + "\n"

"""Why a cell of the matrix differs: is the gradient there more than rounding?

Adam, NAdam and Adagrad divide a gradient by its own size. Where its exact value is zero, or far
below the rounding of its terms, they make whole updates of that rounding, and any other order of
the same operations gives others. In: a cell and the elements that differ. Out: the exact gradient
there, computed in float64, beside its rounding in the precision of the cell.
"""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor

from bench.matrix_steps import IDIOMS, loss_of, make_batch, make_model


@dataclass(frozen=True)
class Cause:
    """Of the elements that differ in one tensor: their largest gradient, and its rounding.

    `largest` is the largest gradient of the model. All are those of the first batch.
    """

    name: str
    kind: str
    elements: int
    gradient: float
    rounding: float
    largest: float

    @property
    def is_rounding(self) -> bool:
        """Whether the gradient has no right digit."""
        return self.gradient <= 10 * self.rounding

    def __str__(self) -> str:
        return (
            f"{self.kind} {self.name} in {self.elements} elements, where the gradient is "
            f"{self.gradient:.0e} at most (the largest is {self.largest:.0e}) and its rounding "
            f"{self.rounding:.0e}"
        )


def cause_of(cell: tuple[str, str, str], name: str, kind: str, differs: Tensor) -> Cause:
    """Why parameter `name`, or its state `kind`, `differs` from eager in a cell."""
    idiom = IDIOMS[cell[2]]
    exact = first_gradients(cell[0], torch.float64)
    rounded = first_gradients(cell[0], idiom.dtype, autocast=idiom.half_precision)
    if differs.shape != exact[name].shape:  # a state that is one number for all elements
        differs = torch.ones_like(exact[name], dtype=torch.bool)
    return Cause(
        name,
        kind,
        int(differs.sum()),
        float(exact[name][differs].abs().max()),
        float((rounded[name].double() - exact[name])[differs].abs().max()),
        max(float(gradient.abs().max()) for gradient in exact.values()),
    )


def first_gradients(
    architecture: str, dtype: torch.dtype, autocast: bool = False
) -> dict[str, Tensor]:
    """Gradients of the first batch at the start of a cell's training, in `dtype`."""
    torch.manual_seed(0)
    model = make_model(architecture, dtype)
    x, y = make_batch(architecture)
    x = x.to(dtype) if x.is_floating_point() else x
    with torch.autocast("cpu", dtype=torch.bfloat16) if autocast else nullcontext():
        loss = loss_of(architecture)(model, x, y)
    loss.backward()
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}

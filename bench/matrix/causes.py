"""Why a cell of the matrix differs from eager: two causes, each with the bound that shows it.

A model that is traced may take another way than in eager: Hugging Face's asks whether it is. Then
torch's own `torch.compile(backend="eager")` of the loss alone, which runs op by op what it traced,
gives what the captured step gives, and its gradients are as near to the exact ones as eager's.

Adam, NAdam and Adagrad divide a gradient by its own size. Where its exact value is zero, or far
below the rounding of its terms, they make whole updates of that rounding, and any other order of
the same operations gives others.

In: a cell, and the elements that differ. Out: a cause with its figures, which says of itself
whether it is rounding. Exact gradients are computed in float64.
"""

from __future__ import annotations

import functools
from contextlib import nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor

from bench.matrix.steps import IDIOMS, LossOf, make_batch, make_model, objective_of

Cell = tuple[str, str, str]
Gradients = dict[str, Tensor]

# Ours is traced by the same rules, and so takes the way that the model takes in any trace.
as_traced = functools.partial(torch.compile, backend="eager")


@dataclass(frozen=True)
class OtherWay:
    """The model takes another way in a trace.

    `apart` says in how many of eager's own roundings a gradient differs, at most, in the tensor
    `name`. `loss` and `tensor` are how far the captured step is from the traced model in eager.
    """

    loss: float
    tensor: float
    name: str
    apart: float

    @property
    def is_rounding(self) -> bool:
        """Whether both ways are as near to the exact gradients: then at most two roundings apart.

        That is the triangle inequality, from eager to the exact gradient and on to the other one.
        """
        return self.apart <= 2

    def __str__(self) -> str:
        return (
            f"the model takes another way where it is traced; torch.compile(backend='eager') of "
            f"the loss alone does as well, and the captured step is within {self.loss:.0e} of its "
            f"losses and {self.tensor:.0e} of its tensors. First gradients of the two ways are at "
            f"most {self.apart:.1f} of eager's own roundings apart ({self.name})"
        )


@dataclass(frozen=True)
class NoDigit:
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


Cause = OtherWay | NoDigit


def other_way(cell: Cell, loss: float, tensor: float) -> OtherWay:
    """The cause of a cell whose captured step is `loss` and `tensor` from the traced model."""
    exact, eager = exact_gradients(cell), gradients(cell)
    traced = gradients(cell, traced=True)
    apart = {
        name: _ratio(_largest(traced[name] - eager[name]), _largest(eager[name] - exact[name]))
        for name in exact
    }
    name = max(apart, key=apart.__getitem__)
    return OtherWay(loss, tensor, name, apart[name])


def no_digit(cell: Cell, name: str, kind: str, differs: Tensor) -> NoDigit:
    """The cause why parameter `name`, or its state `kind`, `differs` from eager in a cell."""
    exact, eager = exact_gradients(cell), gradients(cell)
    if differs.shape != exact[name].shape:  # a state that is one number for all elements
        differs = torch.ones_like(exact[name], dtype=torch.bool)
    return NoDigit(
        name,
        kind,
        int(differs.sum()),
        _largest(exact[name][differs]),
        _largest((eager[name] - exact[name])[differs]),
        max(map(_largest, exact.values())),
    )


def exact_gradients(cell: Cell) -> Gradients:
    """Of the first batch, at the start of a cell's training, in float64."""
    return _gradients(cell[0], objective_of(cell), torch.float64, autocast=False)


def gradients(cell: Cell, *, traced: bool = False) -> Gradients:
    """The same as eager computes them in the precision of the cell, `traced`: in a trace."""
    torch._dynamo.reset()
    objective, idiom = objective_of(cell), IDIOMS[cell[2]]
    if traced:
        objective = as_traced(objective)
    return _gradients(cell[0], objective, idiom.dtype, autocast=idiom.half_precision)


def _gradients(
    architecture: str, objective: LossOf, dtype: torch.dtype, *, autocast: bool
) -> Gradients:
    torch.manual_seed(0)
    model = make_model(architecture, dtype)
    x, y = make_batch(architecture)
    x = x.to(dtype) if x.is_floating_point() else x
    with torch.autocast("cpu", dtype=torch.bfloat16) if autocast else nullcontext():
        loss = objective(model, x, y)
    loss.backward()
    return {n: p.grad.double() for n, p in model.named_parameters() if p.grad is not None}


def _largest(tensor: Tensor) -> float:
    return float(tensor.abs().max())


def _ratio(distance: float, rounding: float) -> float:
    """Where nothing is rounded, any distance is too far."""
    return distance / rounding if rounding else float("inf") if distance else 0.0

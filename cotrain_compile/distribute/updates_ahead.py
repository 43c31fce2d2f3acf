"""Updates ahead: a layer's next forward waits for its own gradients' sums alone (BytePS).

In: an exchange with CPU helpers, a model, what makes an optimizer of parameters. The first rounds
of an exchange go beside the backward, in the order in which it makes gradients; those that are left
when it ends go by what the next forward needs first. A parameter is updated, and its gradient gone,
when the forward comes to its module: others are on their way meanwhile (Peng et al., SOSP 2019, and
Jiang et al., OSDI 2020: tensors have priorities by their layers).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import nn

from cotrain_compile.distribute.helped_rounds import Flat
from cotrain_compile.errors import DistributeError

# Of some parameters, which nothing else updates.
MakeOptimizer = Callable[[list[nn.Parameter]], torch.optim.Optimizer]


def needed_first(flats: Sequence[Flat]) -> list[Flat]:
    """Rounds in the order in which they go: a half beside the backward, as it makes gradients, then
    those of the first layers first."""
    half = len(flats) // 2
    return [*flats[:half], *reversed(flats[half:])]


class UpdatesAhead:
    """The parameters of `model`, each with an optimizer of its own; `flats` are the rounds."""

    def __init__(
        self, model: nn.Module, make_optimizer: MakeOptimizer, flats: Sequence[Flat]
    ) -> None:
        self._flats = flats
        self._names = {param: name for name, param in model.named_parameters()}
        trained = [param for param in self._names if param.requires_grad]
        self._optimizers = {param: make_optimizer([param]) for param in trained}
        self._rounds: Iterator[Any] = iter(())
        self._left: Counter[nn.Parameter] = Counter()
        for module in model.modules():
            if any(param in self._optimizers for param in module.parameters(recurse=False)):
                module.register_forward_pre_hook(self._forward_comes)

    def begun(self, rounds: Iterator[Any]) -> None:
        """A backward has ended; `rounds` has what is left of its exchange."""
        self._rounds = rounds
        next(self._rounds, None)

    def begin(self) -> None:
        """A backward begins: all parameters have to be those of its step.

        Raises `DistributeError` where a forward has not come to one of them.
        """
        late = [self._names[param] for param, count in self._left.items() if count > 0]
        if late:
            raise DistributeError(
                f"{late[0]} has had no update when the backward began: its module did not run in "
                "this forward, and what it computes elsewhere was with old values. Read parameters "
                "in their own modules, or use average_gradients()"
            )
        for flat in self._flats:
            self._left.update(flat.exchanged)

    def has_updated(self, param: nn.Parameter) -> bool:
        """Whether it has the update of the last backward that began."""
        return not self._left[param]

    def kept(self, flat: Flat) -> None:
        """Means of a round are gradients now."""
        for param in flat.exchanged:
            self._left[param] -= 1
            if not self._left[param]:
                self._optimizers[param].step()
                param.grad = None

    def finish(self) -> None:
        """All parameters have their updates after it."""
        for _ in self._rounds:
            pass

    def _forward_comes(self, module: nn.Module, args: tuple[Any, ...]) -> None:
        for param in module.parameters(recurse=False):
            while self._left[param] > 0:
                next(self._rounds)

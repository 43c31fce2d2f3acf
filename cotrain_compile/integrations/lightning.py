"""Lightning's `Trainer`, its step compiled as a whole, by a strategy.

With automatic optimization Lightning calls `training_step`, then the backward, clipping and
`optimizer.step()`. Here the strategy's `training_step` does all of it in one compiled function, on
all micro-batches of an update. What Lightning counts, saves and schedules around that stays. What
the module logs in its `training_step` is kept until the step is over, and logged then.

Private API used: `FitLoop._should_accumulate` of pytorch-lightning. Reason: whether an update
follows is the loop's to say, at the end of an epoch too. Tried with pytorch-lightning 2.6.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from cotrain_compile.entry.check_options import check_options
from cotrain_compile.errors import OptionError

# The package `lightning` has all of `pytorch_lightning` once more, with classes of its own. A
# Trainer takes strategies of the package that it comes from: the one that the user has imported.
if TYPE_CHECKING or "lightning.pytorch" not in sys.modules:
    from pytorch_lightning import LightningModule, Trainer
    from pytorch_lightning.strategies import SingleDeviceStrategy
    from pytorch_lightning.utilities.model_helpers import is_overridden
else:
    from lightning.pytorch import LightningModule, Trainer
    from lightning.pytorch.strategies import SingleDeviceStrategy
    from lightning.pytorch.utilities.model_helpers import is_overridden

# What a compiled step does itself, so that a module's own would be called for nothing.
_OWN = ("backward", "configure_gradient_clipping", "optimizer_zero_grad")


class CotrainStrategy(SingleDeviceStrategy):
    """One device, with a compiled step: `Trainer(strategy=CotrainStrategy(cotrain={...}))`.

    `cotrain` are the options of the backend (`docs/options.md`); without `device` it is the card
    where there is one. Raises `OptionError` for a wrong option, and when training begins for what a
    compiled step cannot hold: manual optimization, a loss that is scaled (16-mixed), a module with
    a `backward`, `configure_gradient_clipping` or `optimizer_zero_grad` of its own.
    """

    def __init__(
        self,
        cotrain: Mapping[str, Any] | None = None,
        device: str | torch.device | None = None,
        **settings: Any,
    ) -> None:
        found = "cuda" if torch.cuda.is_available() else "cpu"
        super().__init__(device=found if device is None else device, **settings)
        self.cotrain_options = dict(cotrain or {})
        check_options(self.cotrain_options)
        self._compiled_step: Callable[[Sequence[tuple[Any, ...]]], Any] | None = None
        self._micro_batches: list[tuple[Any, ...]] = []
        self._logged: list[tuple[str, tuple[Any, ...], dict[str, Any]]] = []

    def setup(self, trainer: Trainer) -> None:
        """As in Lightning; a step compiled for a training before is given up."""
        super().setup(trainer)
        self._compiled_step, self._micro_batches = None, []
        if trainer.training:
            _refuse_what_a_step_cannot_hold(self, trainer.lightning_module)

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        """With the last micro-batch of an update, the whole step; what the module returned.

        With those before it, nothing yet: they wait, and their loss is 0.
        """
        module: Any = self.lightning_module
        self._micro_batches.append((*args, *kwargs.values()))
        if module.trainer.fit_loop._should_accumulate():
            return torch.zeros((), device=self.root_device)
        if self._compiled_step is None:
            step = _whole_step(self, module)
            self._compiled_step = torch.compile(
                step, backend="cotrain", options=self.cotrain_options
            )
        batches, self._micro_batches = self._micro_batches, []
        with self._logging_later(module):
            output = self._compiled_step(batches)
        for method, values, settings in self._logged:
            getattr(module, method)(*values, **settings)
        self._logged.clear()
        return output

    def backward(self, closure_loss: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """Do nothing: the step does it."""
        return closure_loss

    def optimizer_step(
        self, optimizer: Optimizer, closure: Callable[[], Any], *args: Any, **kwargs: Any
    ) -> Any:
        """Call what calls `training_step`, which updates; nothing is left to clip or to update."""
        return closure()

    @contextmanager
    def _logging_later(self, module: LightningModule) -> Iterator[None]:
        """Within it the module's `log` and `log_dict` only note what they are called with."""
        logged = self._logged
        logged.clear()

        def log(*values: Any, **settings: Any) -> None:
            logged.append(("log", _detached(values), settings))

        def log_dict(*values: Any, **settings: Any) -> None:
            logged.append(("log_dict", _detached(values), settings))

        instead = vars(module)
        instead |= {"log": log, "log_dict": log_dict}
        try:
            yield
        finally:
            del instead["log"], instead["log_dict"]


def _detached(values: Any) -> Any:
    if isinstance(values, tuple):
        return tuple(_detached(value) for value in values)
    if isinstance(values, dict):
        return {name: _detached(value) for name, value in values.items()}
    return values.detach() if isinstance(values, Tensor) else values


def _whole_step(
    strategy: CotrainStrategy, module: LightningModule
) -> Callable[[Sequence[tuple[Any, ...]]], Any]:
    (optimizer,) = strategy.optimizers
    trainer, precision = module.trainer, strategy.precision_plugin
    share, most = trainer.accumulate_grad_batches, trainer.gradient_clip_val
    by_value = trainer.gradient_clip_algorithm == "value"
    params = [param for group in optimizer.param_groups for param in group["params"]]

    def step(batches: Sequence[tuple[Any, ...]]) -> Any:
        for batch in batches:
            with precision.train_step_context():
                output: Any = module.training_step(*batch)
            loss = output["loss"] if isinstance(output, dict) else output
            (loss / share).backward()
        if most and by_value:
            nn.utils.clip_grad_value_(params, most)
        elif most:
            nn.utils.clip_grad_norm_(params, most)
        optimizer.step()
        optimizer.zero_grad()
        return _detached(output)

    return step


def _refuse_what_a_step_cannot_hold(strategy: CotrainStrategy, module: LightningModule) -> None:
    own = [name for name in _OWN if is_overridden(name, module)]
    refused = {
        "manual optimization; compile a function of your own in training_step, as the "
        "documentation's page Frameworks has it": not module.automatic_optimization,
        "a scaled loss; give precision='bf16-mixed'": getattr(
            strategy.precision_plugin, "scaler", None
        )
        is not None,
        f"{type(module).__name__}.{' and .'.join(own)}, which the compiled step would not call; "
        "leave it out, and have Trainer(gradient_clip_val=...) clip": bool(own),
    }
    for told, is_so in refused.items():
        if is_so:
            raise OptionError(f"CotrainStrategy cannot train with {told}")

"""Update rules: what each of ATen's fused loops computes, as terms, from its source.

A rule gives, for the settings at hand, the new value of the parameter and of each state, by the
same names as the tensors that the loop takes. Where torch's own optimizer computes the same in more
than one way, a rule has more than one spelling; `docs/replacements.md` says what they are for.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch

from cotrain_compile.runtime.host.live_settings import value_of
from cotrain_compile.runtime.host.terms import Term, Terms

New = Mapping[str, Term]


class Given:
    """What a rule starts from: tensors by name, "gradient" too, and settings.

    A setting is a constant, or a leaf where it is an input of the step.
    """

    def __init__(
        self, terms: Terms, tensors: Mapping[str, Term], settings: Mapping[str, Any], live: Any
    ) -> None:
        self.terms, self._tensors = terms, tensors
        self._settings, self._live = settings, live

    def __getitem__(self, name: str) -> Term:
        return self._tensors[name]

    def has(self, setting: str) -> bool:
        """Whether a setting is neither false nor zero, as the optimizer asks while it is traced."""
        return bool(value_of(self._settings, setting))

    def setting(self, name: str) -> Term:
        if name in self._live:
            return self.terms.leaf(("setting", name), is_scalar=True)
        return self.terms.of(float(value_of(self._settings, name)))


def _gradient(given: Given, *, decays: bool = True) -> Term:
    """With what every loop does to it first."""
    gradient = -given["gradient"] if given.has("maximize") else given["gradient"]
    if decays and given.has("weight_decay"):
        return gradient + given.setting("weight_decay") * given["param"]
    return gradient


def _adam(given: Given) -> Iterator[New]:
    lr, eps, one = given.setting("lr"), given.setting("eps"), given.terms.of(1.0)
    beta1, beta2 = given.setting("betas.0"), given.setting("betas.1")
    is_decoupled = given.has("decoupled_weight_decay")
    gradient = _gradient(given, decays=not is_decoupled)
    param = given["param"]
    if is_decoupled and given.has("weight_decay"):
        param = param * (one - lr * given.setting("weight_decay"))
    step, old = given["step"] + 1.0, given["exp_avg"]
    average = old + (one - beta1) * (gradient - old)
    square = beta2 * given["exp_avg_sq"] + (one - beta2) * (gradient * gradient)
    new, largest = {"step": step, "exp_avg": average, "exp_avg_sq": square}, square
    if given.has("amsgrad"):
        largest = new["max_exp_avg_sq"] = given.terms.maximum(given["max_exp_avg_sq"], square)
    step_size = lr / (one - beta1**step)
    scale = (one - beta2**step) ** 0.5
    yield {**new, "param": param - step_size * (average / (largest**0.5 / scale + eps))}
    # As with `capturable`: the step size is divided into the denominator.
    below = largest**0.5 / (scale * -step_size) + eps / -step_size
    yield {**new, "param": param + average / below}


def _sgd(given: Given) -> Iterator[New]:
    gradient = _gradient(given)
    if not given.has("momentum"):
        yield {"param": given["param"] - given.setting("lr") * gradient}
        return
    momentum, one = given.setting("momentum"), given.terms.of(1.0)
    moved = momentum * given["momentum_buffer"] + (one - given.setting("dampening")) * gradient
    change = gradient + momentum * moved if given.has("nesterov") else moved
    param = given["param"] - given.setting("lr") * change
    yield {"param": param, "momentum_buffer": moved}


def _adagrad(given: Given) -> Iterator[New]:
    gradient, step = _gradient(given), given["step"] + 1.0
    step_size = given.setting("lr") / (1.0 + (step - 1.0) * given.setting("lr_decay"))
    total = given["sum"] + gradient * gradient
    param = given["param"] - step_size * (gradient / (total**0.5 + given.setting("eps")))
    yield {"step": step, "sum": total, "param": param}


# By exact class, as the loops in `fused_loops` are.
UPDATE_RULES: Mapping[type, Callable[[Given], Iterator[New]]] = {
    torch.optim.Adam: _adam,
    torch.optim.AdamW: _adam,
    torch.optim.SGD: _sgd,
    torch.optim.Adagrad: _adagrad,
}

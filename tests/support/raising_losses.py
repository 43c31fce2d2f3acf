"""Losses that raise what eager raises. pytest would rewrite the asserts of a module of tests."""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch import Tensor

SIZES = {"a": 1}


class Unfit(Exception):
    """As many packages write one."""

    def __init__(self, rows: int, wanted: int) -> None:
        super().__init__(f"{rows} rows, {wanted} wanted")
        self.rows = rows


def no_such_name(model: Any, x: Tensor) -> Any:
    return model(x) - targets  # type: ignore[name-defined]  # noqa: F821


def no_such_attribute(model: Any, x: Tensor) -> Any:
    return model.head(x)


def no_such_function(model: Any, x: Tensor) -> Any:
    return torch.square_of(model(x))  # type: ignore[attr-defined]


def no_such_key(model: Any, x: Tensor) -> Any:
    return model(x) * SIZES["b"]


def no_such_place(model: Any, x: Tensor) -> Any:
    return model(x) * [1, 2][x.shape[0]]


def not_bound_yet(model: Any, x: Tensor) -> Any:
    if x.shape[0] == 3:
        scale = 1
    return model(x) * scale


def no_such_module(model: Any, x: Tensor) -> Any:
    import not_there  # type: ignore[import-not-found]

    return not_there.loss(model(x))


def no_such_name_in_a_module(model: Any, x: Tensor) -> Any:
    from torch import not_there  # type: ignore[attr-defined]

    return not_there(model(x))


def division_by_zero(model: Any, x: Tensor) -> Any:
    return model(x) * (5 // (x.shape[0] - 2))


def unfit_value(model: Any, x: Tensor) -> Any:
    raise ValueError(f"no batches of {x.shape[0]}")


def own_class(model: Any, x: Tensor) -> Any:
    raise Unfit(x.shape[0], 3)


def interrupted(model: Any, x: Tensor) -> Any:
    raise KeyboardInterrupt


def ended(model: Any, x: Tensor) -> Any:
    sys.exit(x.shape[0])


def assertion(model: Any, x: Tensor) -> Any:
    assert x.shape[0] == 3, "three rows wanted"
    return model(x)


def assertion_without_words(model: Any, x: Tensor) -> Any:
    assert x.shape[0] == 3
    return model(x)


def caught_in_the_step(model: Any, x: Tensor) -> Any:
    """What raises is caught, as in eager."""
    try:
        import not_there
    except ImportError:
        not_there = None
    try:
        assert x.shape[0] == 3, "three"
    except AssertionError as error:
        caught = str(error)
    return model(x) if not_there is None and caught == "three" else no_such_key(model, x)


LOSSES = [
    no_such_name,
    no_such_attribute,
    no_such_function,
    no_such_key,
    no_such_place,
    not_bound_yet,
    no_such_module,
    no_such_name_in_a_module,
    division_by_zero,
    unfit_value,
    own_class,
    interrupted,
    ended,
    assertion,
    assertion_without_words,
]

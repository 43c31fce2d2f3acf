"""A replaced method of tensors is what a trace calls, however this torch finds it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
from torch import nn
from torch._dynamo.variables.tensor import TensorVariable

from cotrain_compile.capture.dynamo.missing_rules import methods_by_name


@dataclass
class Entry:
    """As a table of torch 2.14 holds them."""

    handler: Callable[..., Any]


def test_a_table_of_methods_is_no_way_past_what_replaces_one() -> None:
    """As of torch 2.14, where means over ranks were left out so."""
    names = ("backward", "requires_grad_", "size")
    table = {name: Entry(lambda *_, old=name: f"old {old}") for name in names}
    called = object.__new__(TensorVariable)
    with mock.patch.object(TensorVariable, "tp_methods", table, create=True):
        with methods_by_name():
            for name in names[:2]:
                new = mock.Mock(return_value=f"new {name}")
                with mock.patch.object(TensorVariable, f"method_{name}", new):
                    assert table[name].handler(called, "tx", "gradient") == f"new {name}"
                new.assert_called_once_with("tx", "gradient")
            assert table["size"].handler(called, "tx") == "old size"
        assert table["backward"].handler(called, "tx") == "old backward"


def test_a_traced_backward_is_what_replaces_it() -> None:
    """With the table of this torch, if it has one."""
    model = nn.Linear(2, 2)

    def step(x: torch.Tensor) -> None:
        model(x).sum().backward()

    calls = list[Any]()
    original = TensorVariable.method_backward

    def noted(*args: Any, **kwargs: Any) -> Any:
        calls.append(args)
        return original(*args, **kwargs)

    changed = mock.patch.object(TensorVariable, "method_backward", noted)
    traced = torch._dynamo.config.patch(trace_autograd_ops=True)
    with methods_by_name(), changed, traced:
        torch.compile(step, backend="eager")(torch.ones(1, 2))
    assert calls

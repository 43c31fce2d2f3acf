"""What ops on fake tensors give is what torch itself makes of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor
from torch._dynamo import config
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, disable_fake_tensor_cache
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from cotrain_compile.capture.dynamo import unread_code
from cotrain_compile.capture.nodes import fake_calls
from cotrain_compile.entry.tracing import trace_graph
from tests.support.alike_layers import Build, Layer, Model, job


@pytest.fixture(autouse=True)
def at_once() -> Iterator[None]:
    """Fake ops are answered as in a trace, from nothing that was kept before."""
    FakeTensorMode.cache_clear()
    with ExitStack() as stack:
        for owner, name, instead in fake_calls.fake_calls_at_once():
            stack.enter_context(mock.patch.object(owner, name, instead))
        yield


def _seen(value: Any) -> object:
    """All that can be asked of a fake tensor."""
    if not isinstance(value, FakeTensor):
        return value
    own = {name: kept for name, kept in vars(value).items() if name != "_debug_trace"}
    return (
        value.shape,
        value.stride(),
        value.storage_offset(),
        value.untyped_storage().nbytes(),
        value.dtype,
        value.device,
        value.requires_grad,
        value.is_leaf,
        value.is_conj(),
        value.is_neg(),
        str(torch._C._dispatch_keys(value)),
        own,
    )


OPS: dict[str, Callable[[Tensor], Any]] = {
    "sum": lambda x: x.add(x),
    "whole number": lambda x: x.long() + 1,
    "fraction": lambda x: x.long() + 1.0,
    "true": lambda x: x.long() + True,
    "view": lambda x: x.view(-1)[3:],
    "transposed": lambda x: x.t(),
    "expanded": lambda x: x[:, None].expand(-1, 5, -1),
    "in place": lambda x: x.clone().mul_(2.0),
    "several": lambda x: x.max(1),
    "wide product": lambda x: torch.ones(2, 3, 4) @ x,
    "unsafe view": lambda x: torch.ops.aten._unsafe_view(x, [-1, 2]),
    "list": lambda x: torch.cat([x, x], 1),
    "new": lambda x: x.new_zeros(3),
    "other type": lambda x: x.to(torch.float64),
    "conjugate": lambda x: torch.complex(x, x).conj() * 2,
    "negative": lambda x: torch.complex(x, x).conj().imag + 1,
    "norm": lambda x: torch.nn.functional.layer_norm(x, x.shape[1:]),
    "product": lambda x: x[None] @ x.t(),
    "of no inputs": lambda x: torch.ones(2, dtype=x.dtype),
    "default type": lambda x: x.long() / 2,
}
LAYOUTS: dict[str, Callable[[], Tensor]] = {
    "rows": lambda: torch.ones(4, 6),
    "trained": lambda: torch.ones(4, 6, requires_grad=True),
    "half": lambda: torch.ones(4, 6, dtype=torch.bfloat16).float(),
    "part": lambda: torch.ones(8, 6)[4:],
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("op", OPS)
def test_an_op_gives_what_torch_gives(op: str, layout: str) -> None:
    with FakeTensorMode() as mode:
        x = LAYOUTS[layout]()
        with disable_fake_tensor_cache(mode):
            wanted = OPS[op](x)
        for _ in range(3):  # made, kept, found
            found = OPS[op](x)
            pairs = zip(_flat(found), _flat(wanted), strict=True)
            assert all(_seen(mine) == _seen(theirs) for mine, theirs in pairs)


def _flat(value: Any) -> list[Any]:
    return list(value) if isinstance(value, tuple) else [value]


def test_what_looks_otherwise_is_not_mixed_up() -> None:
    made = {}
    for default in (torch.float32, torch.float64):
        torch.set_default_dtype(default)
        try:
            with FakeTensorMode():
                for grad in (False, True):
                    x = torch.ones(2, 3, dtype=torch.float32, requires_grad=grad)
                    for scalar in (1, 1.0, True):
                        for _ in range(2):
                            whole = torch.ones(2, 3, dtype=torch.int32)
                            kinds = (whole * scalar).dtype, (x * scalar).requires_grad
                            made[default, grad, type(scalar)] = kinds
        finally:
            torch.set_default_dtype(torch.float32)
    assert {kinds[0] for key, kinds in made.items() if key[2] is not float} == {torch.int32}
    assert all(kinds[0] == key[0] for key, kinds in made.items() if key[2] is float)
    assert all(kinds[1] == key[1] for key, kinds in made.items())


def test_a_view_shows_the_memory_of_what_it_was_asked_of() -> None:
    with FakeTensorMode():
        several = [torch.ones(4, 6) for _ in range(3)]
        views = [x.view(-1) for x in several]
    shown = [view.untyped_storage()._cdata for view in views]
    assert shown == [x.untyped_storage()._cdata for x in several]
    assert len(set(shown)) == 3


def test_sizes_that_are_not_known_are_torchs() -> None:
    mode = FakeTensorMode(shape_env=ShapeEnv())
    x = mode.from_tensor(torch.ones(4, 6), static_shapes=False)
    assert isinstance((x + 1).shape[0], torch.SymInt)
    assert not any(key.key[0] is fake_calls._OURS for key in FakeTensorMode.cache)


def test_a_tensor_of_another_mode_is_refused() -> None:
    with FakeTensorMode():
        x = torch.ones(2)
    with FakeTensorMode(), pytest.raises(AssertionError, match="fake mode"):
        x + 1


STEPS: dict[str, Build] = {
    "alike": job(lambda: Model([Layer(drop=0.1) for _ in range(5)])),
    "clipped": job(lambda: Model([Layer(), torch.nn.Tanh()]), clips=True),
}


@pytest.mark.parametrize("step", STEPS)
def test_torch_checks_every_answer_of_a_trace(step: str) -> None:
    with config.patch(fake_tensor_cache_crosscheck_enabled=True):
        trace_graph(STEPS[step])
    ours = [key.key[0] is fake_calls._OURS for key in FakeTensorMode.cache]
    assert sum(ours) > 0.9 * len(ours) > 20


@pytest.mark.parametrize("step", STEPS)
def test_a_step_is_the_same_without_them(step: str) -> None:
    at_once = trace_graph(STEPS[step]).text()
    with (
        mock.patch.object(fake_calls, "TRIED", ("none",)),
        mock.patch.object(unread_code, "TRIED", ("none",)),
    ):
        FakeTensorMode.cache_clear()
        assert trace_graph(STEPS[step]).text() == at_once


def test_the_module_for_checks_gets_no_code() -> None:
    written: list[torch.fx.GraphModule] = []
    original = torch.fx.GraphModule.recompile

    def noted(module: torch.fx.GraphModule) -> Any:
        written.append(module)
        return original(module)

    with mock.patch.object(torch.fx.GraphModule, "recompile", noted):
        trace_graph(STEPS["alike"])
    with (
        mock.patch.object(torch.fx.GraphModule, "recompile", noted),
        mock.patch.object(unread_code, "TRIED", ("none",)),
    ):
        before = len(written)
        trace_graph(STEPS["alike"])
    assert len(written) - before == before + 1

"""Fake calls: ops on fake tensors, which a trace makes ten thousand times, in less Python.

torch keeps what each op makes of tensors that look like this, and asks for it with seventeen facts
of each tensor. Strided tensors of known sizes have eleven that differ; these are asked for here.
What is not as plain is left to torch. An answer is what torch has kept, and is made as torch does.

Private torch API used: `FakeTensorMode.__torch_dispatch__`, `._cache_key`,
`._get_output_tensor_from_cache_entry` and `._cached_dispatch_impl`, the fields of entries, what a
`FakeTensor` keeps of itself, `Tensor._make_subclass`. Reason: it is a seventh of a trace. Tried on
torch 2.13.0.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch._subclasses import fake_tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx.experimental.proxy_tensor import get_proxy_mode

from cotrain_compile.capture.nodes.kernel_strides import DIFFERENT

aten = torch.ops.aten
TRIED = ("2.13.",)
_OURS = object()  # begins our keys: torch's own begin otherwise
_PLAIN = (int, float, bool, str, type(None), torch.dtype, torch.device, torch.layout)
_PLAIN_TYPES = frozenset({*_PLAIN, torch.memory_format})
_STRIDED = torch.strided


def fake_calls_at_once() -> Iterator[tuple[Any, str, Any]]:
    """What is replaced so that fake ops are answered at once: owner, name, what stands there."""
    if not torch.__version__.startswith(TRIED) or fake_tensor.FakeTensorConfig.debug:
        return
    for name, instead in (
        ("__torch_dispatch__", _dispatched),
        ("_cache_key", _keyed),
        ("_get_output_tensor_from_cache_entry", _made),
    ):
        yield FakeTensorMode, name, instead(vars(FakeTensorMode)[name])


def _dispatched(original: Callable[..., Any]) -> Callable[..., Any]:
    """`original` without words for a log that nobody reads; it is asked mostly for a device."""
    answers: Mapping[Any, Callable[..., Any]] = fake_tensor._DISPATCH_META_HANDLERS
    others = {*fake_tensor._DISPATCH_HANDLE_DIRECTLY, *DIFFERENT}
    is_logged = fake_tensor.log.isEnabledFor(logging.DEBUG)

    @functools.wraps(original)
    def dispatch(self: Any, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if (answer := answers.get(func)) is not None:
            return answer(args)
        if is_logged or func in others or not self.cache_enabled:
            return original(self, func, types, args, kwargs or {})
        # torch keeps nothing of the second, whose kernel is that of the first.
        func = aten.view.default if func is aten._unsafe_view.default else func
        return self._cached_dispatch_impl(func, types, args, kwargs or {})

    return dispatch


def _keyed(original: Callable[..., Any]) -> Callable[..., Any]:
    """`original`, which says under what an answer is kept, for tensors that are not plain."""

    @functools.wraps(original)
    def key_of(self: Any, state: Any, func: Any, args: Any, kwargs: Any) -> Any:
        facts = [
            _OURS,
            func,
            torch.get_default_dtype(),
            torch._C._get_default_device(),
            torch.is_inference_mode_enabled(),
            self.shape_env.settings if self.shape_env else None,
            get_proxy_mode() is not None,
        ]
        if self.in_kernel_invocation or not _put(facts, args, self):
            return original(self, state, func, args, kwargs)
        if kwargs and not (_put(facts, kwargs, self) and _put(facts, kwargs.values(), self)):
            return original(self, state, func, args, kwargs)
        return fake_tensor._DispatchCacheKey(tuple(facts))

    return key_of


def _put(facts: list[object], args: Iterable[Any], mode: FakeTensorMode) -> bool:
    """Add what answers hang on to `facts`; whether `args` are all plain."""
    for arg in args:
        kind = type(arg)
        if kind is FakeTensor:
            if not _is_plain(arg, mode):
                return False
            facts += (
                kind,
                arg.dtype,
                arg.shape,
                arg.stride(),
                arg.storage_offset(),
                arg.untyped_storage().nbytes(),
                arg._fake_device,
                arg.requires_grad,
                arg.is_conj(),
                arg.is_neg(),
                arg.is_inference(),
            )
        elif kind in _PLAIN_TYPES:
            facts += (kind, arg)  # with its type: 1 and 1.0 are equal
        elif kind is list or kind is tuple or kind is torch.Size:
            facts += (kind, len(arg))
            if not _put(facts, arg, mode):
                return False
        else:
            return False
    return True


def _is_plain(value: Any, mode: FakeTensorMode) -> bool:
    return (
        value.fake_mode is mode
        and value.constant is None
        and value.layout is _STRIDED
        and not value._has_symbolic_sizes_strides
    )


def _made(original: Callable[..., Any]) -> Callable[..., Any]:
    """`original`, which makes a tensor as an entry says, for those that are not plain."""

    @functools.wraps(original)
    def make(self: Any, state: Any, entry: Any, key: Any, func: Any, args: Any) -> Any:
        shown = entry.metadata
        if shown is None or key.key[0] is not _OURS or not _has_known_sizes(shown):
            return original(self, state, entry, key, func, args)
        with torch._C._DisableTorchDispatch():
            bare = torch.empty_strided(
                shown.shape,
                shown.stride,
                dtype=shown.dtype,
                device="meta",
                requires_grad=shown.requires_grad,
            )
            if entry.view_idx is not None:
                memory = args[entry.view_idx].untyped_storage()
                bare.set_(memory, shown.storage_offset, shown.shape, shown.stride)
        return fake_of(self, bare, shown.device)

    return make


def _has_known_sizes(shown: Any) -> bool:
    """Whether an entry is of a strided tensor whose every number is known."""
    return (
        shown.layout is _STRIDED
        and not shown.is_conj
        and not shown.is_neg
        and type(shown.storage_offset) is int
        and all(type(size) is int for size in shown.shape)
        and all(type(step) is int for step in shown.stride)
    )


def fake_of(mode: FakeTensorMode, bare: torch.Tensor, device: torch.device) -> FakeTensor:
    """A fake tensor on `device` of one of no device, as `FakeTensor` makes it."""
    made: FakeTensor = torch.Tensor._make_subclass(
        FakeTensor, bare, bare.requires_grad, dispatch_device=True, device_for_backend_keys=device
    )
    if mode._allow_unsafe_data_ptr_access:
        torch._C._set_warn_deprecated_on_mutable_data_ptr(made)
    else:
        torch._C._set_throw_on_mutable_data_ptr(made)
    vars(made).update(_unset(), fake_mode=mode, _fake_device=device)
    return made


@functools.cache
def _unset() -> dict[str, None]:
    """What a new fake tensor has that is None, by name."""
    new = vars(FakeTensor(FakeTensorMode(), torch.empty(0, device="meta"), torch.device("cpu")))
    return {name: None for name, value in new.items() if value is None}

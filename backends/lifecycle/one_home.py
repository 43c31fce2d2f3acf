"""One home: tensors that share memory lie on one tier, whatever a plan made for them apart says.

In: the tensors of a call, each with the tier of its home. Out: a refusal where tensors that were
apart when the step was planned have become parts of one, and their homes are on both tiers, or one
is fetched: the memory can be on one tier alone, is fetched as a whole, and the plan's figures would
not be what the step takes. Those that share memory when a step is planned are written by none.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping

import torch

from cotrain_compile.errors import CaptureError
from cotrain_compile.machine import Tier


def refuse_two_homes(
    homed: Iterable[tuple[str, torch.Tensor, Tier]],
    fetched: Collection[str] = (),
    written: Collection[str] = (),
) -> None:
    """Raise `CaptureError` where tensors with homes on both tiers share memory; by their names.

    And where one of those that do is `fetched` to the device, and one is `written`.
    """
    first: dict[int, tuple[str, Tier]] = {}
    for name, tensor, tier in homed:
        other, its_tier = first.setdefault(tensor.untyped_storage()._cdata, (name, tier))
        why, both = "", {name, other}
        if its_tier is not tier:
            why = f"the home of one is on the {its_tier.value}, of the other on the {tier.value}"
        elif len(both) > 1 and not both.isdisjoint(fetched) and not both.isdisjoint(written):
            why = "they rest on the host, and either would be fetched with all of it"
        if why:
            raise CaptureError(
                f"{other} and {name} share memory, which they did not when the step was planned: "
                f"{why}. Give each its own (p.data = p.data.clone()), or call "
                "torch._dynamo.reset() to have the step planned for tensors that share memory. "
                "Nothing was updated"
            )


def memory_of(named: Iterable[tuple[str, object]]) -> dict[int, str]:
    """The addresses of the storages of tensors, with the name of one in each."""
    tensors = [(name, value) for name, value in named if isinstance(value, torch.Tensor)]
    return {address: name for name, value in tensors if (address := _address(value))}


def refuse_given_in(written: Mapping[int, str], given: Iterable[tuple[str, object]]) -> None:
    """Raise `CaptureError` where an argument lies in memory that the step has `written`."""
    for name, value in given:
        if isinstance(value, torch.Tensor) and (other := written.get(_address(value))):
            raise CaptureError(
                f"{name} is in the memory of {other}, which the step writes, as no argument was "
                "when it was planned. Pass in a .clone() of it. Nothing was updated"
            )


def _address(value: torch.Tensor) -> int:
    """Where the storage of `value` begins; 0 where it has no memory of its own, or no bytes."""
    try:
        return value.untyped_storage().data_ptr()
    except (NotImplementedError, RuntimeError):  # as of a subclass that holds others
        return 0

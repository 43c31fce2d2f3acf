"""Swapped: the parameters of a stage, on the device only while the stage has its turns.

As in Harmony's pipeline (Li et al., VLDB 2022) a stage runs all of its micro-batches back to back:
its parameters come once for its forwards and once for its backwards, and its gradients leave once.
They rest in the model, on the host. What the turns read are copies, which have memory only in
between; so no plan of a turn fetches anything, and no two stages of a rank are there at once.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import torch
from torch import nn

from cotrain_compile.machine import Machine, Tier
from cotrain_compile.runtime.network import sleep_until

# How a copy is made: (to, from, whether it goes to the device).
Copy = Callable[[torch.Tensor, torch.Tensor, bool], None]


class Swapped:
    """The stages of a rank that take turns on its device. At most one of them is `here`."""

    def __init__(self, copy: Copy) -> None:
        self._copy = copy
        self.here: SwappedStage | None = None
        self.fetched_bytes = 0
        self.sent_bytes = 0

    def stage(self, module: nn.Module) -> SwappedStage:
        """The stage of `module`, which gets parameters of its own; it is here then."""
        self.leave()
        made = SwappedStage(self, module)
        self.here = made
        return made

    def leave(self) -> None:
        """Nothing is on the device after it."""
        if self.here is not None:
            self.here.leave()
            self.here = None

    def fetch(self, to: torch.Tensor, home: torch.Tensor) -> None:
        self._copy(to, home, True)
        self.fetched_bytes += home.nbytes

    def send_home(self, home: torch.Tensor, gradient: torch.Tensor) -> None:
        """Add a gradient to the one that rests at home."""
        came = torch.empty_like(home)
        self._copy(came, gradient, False)
        home.add_(came)
        self.sent_bytes += gradient.nbytes


class SwappedStage:
    """One stage, whose module has copies of the parameters at home; trained ones have gradients."""

    def __init__(self, rank: Swapped, module: nn.Module) -> None:
        self._rank = rank
        self._copies = _with_own_parameters(module)
        self._is_here = True
        self._has_gradients = False
        for _, copy in self._trained:
            copy.grad = torch.zeros_like(copy)
            _free(copy.grad)

    def come(self, *, backward: bool) -> None:
        """The parameters are on the device after it; for a `backward` gradients of zeros as well.

        Others leave first.
        """
        if self._rank.here is not self:
            self._rank.leave()
            self._rank.here = self
        with torch.no_grad():
            if not self._is_here:
                for home, copy in self._copies:
                    _allocate(copy)
                    self._rank.fetch(copy, home)
            if backward and not self._has_gradients:
                for _, copy in self._trained:
                    assert copy.grad is not None  # since it was made
                    _allocate(copy.grad).zero_()
        self._is_here = True
        self._has_gradients = self._has_gradients or backward

    def leave(self) -> None:
        """Gradients are at home after it, and the device has nothing of this stage."""
        with torch.no_grad():
            if self._has_gradients:
                for home, copy in self._trained:
                    assert home.grad is not None  # a step attaches them
                    assert copy.grad is not None
                    self._rank.send_home(home.grad, copy.grad)
                    _free(copy.grad)
            for _, copy in self._copies:
                _free(copy)
        self._is_here = self._has_gradients = False

    @property
    def _trained(self) -> list[tuple[nn.Parameter, nn.Parameter]]:
        return [(home, copy) for home, copy in self._copies if home.requires_grad]


def copier(machine: Machine | None) -> Copy:
    """What copies; between the spaces of a `machine` in no less time than its links take."""

    def copy(to: torch.Tensor, source: torch.Tensor, up: bool) -> None:
        begins_s = time.perf_counter()
        to.copy_(source)
        if machine is not None:
            ends = (Tier.HOST, Tier.DEVICE) if up else (Tier.DEVICE, Tier.HOST)
            sleep_until(begins_s + machine.copy_s(source.nbytes, *ends))

    return copy


def _with_own_parameters(module: nn.Module) -> list[tuple[nn.Parameter, nn.Parameter]]:
    """Give `module` copies of its parameters, one for each that is shared; both, pair by pair."""
    copies: dict[int, tuple[nn.Parameter, nn.Parameter]] = {}
    for part in module.modules():
        for name, home in part.named_parameters(recurse=False):
            if id(home) not in copies:
                own = nn.Parameter(home.detach().clone(), home.requires_grad)
                copies[id(home)] = (home, own)
            setattr(part, name, copies[id(home)][1])
    return list(copies.values())


def _allocate(tensor: torch.Tensor) -> torch.Tensor:
    storage = tensor.untyped_storage()
    storage.resize_(tensor.nbytes)
    return tensor


def _free(tensor: torch.Tensor) -> None:
    tensor.untyped_storage().resize_(0)

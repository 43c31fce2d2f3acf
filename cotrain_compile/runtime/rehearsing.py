"""Rehearsing: a device that runs a step without writing what the user holds.

In: a device. Out: within the context, this package's ops take and free its memory and start what
writes to fresh tensors; of the rest they note that it came.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import fx

from cotrain_compile.runtime.device import Device
from cotrain_compile.runtime.ops import Bundle, Launch, Runtime, running_on


@contextmanager
def rehearsing(device: Device) -> Iterator[None]:
    """Within it, this package's ops run on `device` but write nothing that the user holds.

    Memory is taken and freed, and copies into fresh tensors run, as in the step itself.
    """
    with running_on(_Rehearsal(device)):
        yield


class _Rehearsal(Runtime):
    """Starts what writes to nothing that was there before; of the rest, notes that it came."""

    def __init__(self, device: Device) -> None:
        self._device = device

    def offload(self, source: torch.Tensor, launch: Launch) -> torch.Tensor:
        return self._device.offload(source, launch)

    def offload_into(self, destination: torch.Tensor, source: torch.Tensor, launch: Launch) -> None:
        self._device.skip(launch)

    def prefetch(self, source: torch.Tensor, launch: Launch) -> torch.Tensor:
        return self._device.prefetch(source, launch)

    def prefetch_into(
        self, destination: torch.Tensor, source: torch.Tensor, launch: Launch
    ) -> None:
        self._device.skip(launch)

    def host_cast(self, source: torch.Tensor, dtype: torch.dtype, launch: Launch) -> torch.Tensor:
        return self._device.host_cast(source, dtype, launch)

    def run_region(self, region: fx.GraphModule, inputs: Sequence[Any], launch: Launch) -> None:
        self._device.skip(launch)

    def copy_all(
        self, sources: Sequence[torch.Tensor], bundle: Bundle, *, down: bool
    ) -> list[torch.Tensor]:
        return self._device.copy_all(sources, bundle, down=down)

    def copy_all_into(
        self,
        destinations: Sequence[torch.Tensor],
        sources: Sequence[torch.Tensor],
        bundle: Bundle,
        *,
        down: bool,
    ) -> None:
        self._skip_all(bundle)

    def run_regions(
        self,
        regions: Sequence[fx.GraphModule],
        inputs: Sequence[Sequence[Any]],
        bundle: Bundle,
    ) -> None:
        self._skip_all(bundle)

    def _skip_all(self, bundle: Bundle) -> None:
        for launch in bundle.members:
            self._device.skip(launch)

    def wait(self, tasks: Sequence[str]) -> None:
        self._device.wait(tasks)

    def wait_previous(self, tasks: Sequence[str]) -> None:
        pass

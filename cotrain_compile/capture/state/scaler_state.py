"""State of a loss scaler, made before the first trace on its first use, and undone if that fails.

Private torch API used: `GradScaler._scale`, `._growth_tracker`, `._device`,
`._lazy_init_scale_growth_tracker`. Reason: they hold the state a captured step reads and writes.
Tried on torch 2.11.0, 2.13.0 and 2.15.0.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.amp.grad_scaler import GradScaler

from cotrain_compile.capture.offline.offline import made_as_traced


@dataclass
class ScalerRecord:
    """A scaler of the step, and whether tracing created its tensors."""

    scaler: GradScaler
    created: bool = False

    def start_tracing(self) -> None:
        """Create scale and growth tracker, which eager does at the first `scale(loss)`."""
        if self.scaler.is_enabled() and self.scaler._scale is None:
            with made_as_traced():
                self.scaler._lazy_init_scale_growth_tracker(torch.device(self.scaler._device))
            self.created = True

    def undo(self) -> None:
        """Remove what this tracing created."""
        if self.created:
            self.scaler._scale = self.scaler._growth_tracker = None

    def tensors(self) -> dict[str, Tensor | None]:
        """The state of the scaler that the step reads and writes, by name."""
        if not self.scaler.is_enabled():
            return {}
        return {"scale": self.scaler._scale, "growth_tracker": self.scaler._growth_tracker}

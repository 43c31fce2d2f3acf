"""DistributedDataParallel as a marker: what a step traces in its place, and what it refuses.

Its reducer works in hooks of autograd's engine, which a trace never runs. Here its forward is
traced as that of its module, behind the broadcast of buffers that it does, and each backward ends
with what its reducer does: every gradient becomes its mean over the ranks, divided before it is
added up, as the reducer does it.

Private torch API used: `DistributedDataParallel.will_sync_module_buffers`, `._comm_hooks`,
`._join_config`, `.parameters_to_ignore` and what else its constructor keeps. Reason: nothing public
says how it is set up. Tried on torch 2.13.0.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel


@dataclass
class SeenDdp:
    """A `DistributedDataParallel` that a trace has called, and its gradients not reduced yet.

    `synchronises` is what its forward was last called with: not so within `no_sync()`. `added_to`
    has what stands for parameters in the trace, by their ids.
    """

    ddp: DistributedDataParallel
    group_name: str
    ranks: int
    params: frozenset[int]
    synchronises: bool = True
    added_to: dict[int, Any] = field(default_factory=dict)


def seen_first(ddp: DistributedDataParallel) -> SeenDdp:
    """`ddp` as it is when a trace first calls it."""
    return SeenDdp(ddp, *group_of(ddp), frozenset(map(id, ddp._module_parameters)))


def group_of(ddp: DistributedDataParallel) -> tuple[str, int]:
    """The name and the size of the process group over which `ddp` takes means."""
    group: Any = ddp.process_group
    return str(group.group_name), int(group.size())


def why_refused(ddp: DistributedDataParallel) -> str | None:
    """What of `ddp` a captured step cannot do, with the way on; None where it can do all."""
    has = vars(ddp).get
    if has("_comm_hooks") or "buffer_hook" in vars(ddp) or _builtin_hook(ddp):
        return (
            "a communication hook is registered on DistributedDataParallel, which a captured step "
            "would skip; leave it out (register_comm_hook), or reduce the gradients in the step"
        )
    if getattr(has("_join_config"), "enable", False):
        return (
            "the step runs within DistributedDataParallel.join(), and a captured step runs equally "
            "often on every rank; give each rank as many batches (drop_last=True), without join()"
        )
    if has("mixed_precision") is not None:
        return (
            "DistributedDataParallel casts parameters by hooks (mixed_precision=...), which a "
            "captured step would skip; use torch.autocast in the step"
        )
    if has("_delay_all_reduce_params"):
        return (
            "DistributedDataParallel reduces some gradients in a hook of its own "
            "(delay_all_reduce_named_params), which a captured step would skip; leave it out"
        )
    if has("_use_python_reducer"):
        return (
            "DistributedDataParallel was made with torch._dynamo.config.optimize_ddp = "
            '"python_reducer", whose hooks would reduce gradients twice; leave that setting out'
        )
    return None


def _builtin_hook(ddp: DistributedDataParallel) -> bool:
    """Whether a hook of torch's own is registered, of which Python knows by its log alone."""
    logger = vars(ddp).get("logger")
    logged = logger._get_ddp_logging_data().strs_map if logger is not None else {}
    return bool(logged.get("comm_hook"))


def forward(self: Any, group_name: str, ranks: int, *inputs: Any, **kwargs: Any) -> Any:
    """What is traced for `DistributedDataParallel.forward`."""
    if ranks > 1 and self.will_sync_module_buffers():
        with torch.no_grad():
            for name, buffer in self.module.named_buffers():
                if name not in self.parameters_to_ignore:
                    sent = torch.ops._c10d_functional.broadcast(buffer.contiguous(), 0, group_name)
                    buffer.copy_(torch.ops._c10d_functional.wait_tensor(sent))
    self.require_forward_param_sync = torch.is_grad_enabled() and self.require_backward_grad_sync
    return self.module(*inputs, **kwargs)


def take_mean(parameter: torch.Tensor, group_name: str, ranks: int) -> None:
    """What is traced for the reducer: the gradient of `parameter` becomes its mean over ranks."""
    with torch.no_grad():
        gradient = parameter.grad
        assert gradient is not None
        part = (gradient * (1.0 / ranks)).contiguous()  # a collective's result is contiguous
        total = torch.ops._c10d_functional.all_reduce(part, "sum", group_name)
        gradient.copy_(torch.ops._c10d_functional.wait_tensor(total))

"""Burst: each layer of a model runs on a number of ranks of its own, its width (DeepPool).

The samples of a step are shared evenly by the first ranks, as many as the layer is wide. Others
have none: they run a stand-in of one row, whose gradient is zero, since models fail on no rows.
Before a layer of another width samples are sent to where they belong, and their gradients back. A
parameter's gradient is summed over the ranks of its layer, so it is that of one process; a rank
outside has none and leaves the parameter as it is. The first rank has all of them. Ranks meet
before samples are sent, and when all have done their backward, so that one that fails between two
of these is an error on all. Sums go beside the backward, the last layers first; after an error all
ranks make those that are left, so that none waits for one, and nobody looks at them.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from cotrain_compile import files
from cotrain_compile.cluster.model.strategy import Answer
from cotrain_compile.distribute.meet import first_line, meeting_of
from cotrain_compile.distribute.ranks import calls_in_order
from cotrain_compile.errors import CotrainError, DistributeError, ExchangeFailed, OptionError

# What a traced profile calls that which is in no numbered module.
_NO_MODULES = ("input", "head")


class Burst:
    """A model by widths. Every rank calls `backward` with the whole batch, then its optimizer."""

    def __init__(self, model: nn.Module, widths: Mapping[str, int]) -> None:
        self.model = model
        self.widths = dict(widths)
        self.rank, self.ranks = dist.get_rank(), dist.get_world_size()
        self._width, self._samples = 0, 0
        self._meeting = meeting_of(tuple(range(self.ranks)))
        shapes = [(name, tuple(param.shape)) for name, param in model.named_parameters()]
        self._meeting.meet(
            f"burst {sorted(self.widths.items())} {shapes}", lambda: f"has widths {self.widths}"
        )
        self._width_of = _widths_of_parameters(model, self.widths, self.ranks)
        with _exchanges():
            # Every rank makes every group, in the same order.
            used = sorted({*self._width_of.values(), *self.widths.values()})
            self._groups = {width: dist.new_group(list(range(width))) for width in used}
            _start_equal(model)
        for name, width in self.widths.items():
            model.get_submodule(name).register_forward_pre_hook(self._before(name, width))

    def backward(
        self,
        loss_fn: Callable[[Any, torch.Tensor], torch.Tensor],
        batch: torch.Tensor,
        target: torch.Tensor,
    ) -> float:
        """Gradients of `loss_fn`, a mean over samples, for the whole batch; that loss, on all.

        Where a rank fails no rank has gradients, and each raises: its own error, `RanksApart` where
        one tells of its error or has another batch, `ExchangeFailed` where one dies or hangs. After
        the first two all may go on.
        """
        self._meeting.meet(
            f"burst step {tuple(batch.shape)} {tuple(target.shape)}",
            lambda: f"has a batch of shape {tuple(batch.shape)}",
        )
        self._samples, self._width = len(batch), next(iter(self.widths.values()))
        _check_samples(self._samples, self.widths)
        self._sums = _Sums(self.model, self._width_of, self._groups)
        try:
            with _exchanges():
                return self._loss(loss_fn, batch, target)
        except BaseException as error:
            self._meeting.tell_failure(error)
            if not isinstance(error, ExchangeFailed):
                self._sums.finish()
            self.model.zero_grad(set_to_none=True)
            raise

    def _loss(
        self,
        loss_fn: Callable[[Any, torch.Tensor], torch.Tensor],
        batch: torch.Tensor,
        target: torch.Tensor,
    ) -> float:
        own = self._rows(self._width)
        output = self.model(batch[own] if self.rank < self._width else batch[:1])
        rows = self._rows(self._width)
        if self.rank < self._width:
            loss = loss_fn(output, target[rows]) / self._width
        else:
            loss = output.sum() * 0  # it sends and receives with the others
        with calls_in_order(self._sums.params, self._sums.begin_next):
            loss.backward()
        self._meet("sums gradients")
        self._sums.finish()
        total = loss.detach().clone()
        dist.all_reduce(total)
        return float(total)

    def _meet(self, does: str) -> None:
        self._meeting.meet(f"burst {does}", lambda: does)

    def clip_grad_norm(self, max_norm: float) -> torch.Tensor:
        """Clip gradients by the norm of all of them, which only the first rank has."""
        params = [param for param in self.model.parameters() if param.grad is not None]
        grads = [param.grad for param in params if param.grad is not None]
        norm = nn.utils.get_total_norm(grads)
        dist.broadcast(norm, 0)
        nn.utils.clip_grads_with_norm_(params, max_norm, norm)
        return norm

    def _rows(self, width: int) -> slice:
        each = self._samples // width
        first = min(self.rank, width) * each
        return slice(first, first + each if self.rank < width else first)

    def _before(self, name: str, width: int) -> Callable[..., Any]:
        def redistribute(module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...] | None:
            here = self._rows(self._width)
            if not args or not isinstance(args[0], torch.Tensor):
                raise DistributeError(f"module {name} has to get a tensor as first argument")
            count = max(1, here.stop - here.start)
            if len(args[0]) != count:
                raise DistributeError(
                    f"module {name} gets {len(args[0])} rows where this rank has {count} samples;"
                    f" the first dimension must be the batch"
                )
            if width == self._width:
                return None
            sent = _overlaps(self._samples, self.rank, self._width, width, self.ranks)
            received = _overlaps(self._samples, self.rank, width, self._width, self.ranks)
            self._width = width
            moved: Any = _Moved  # torch gives `apply` no types
            move = partial(self._move, name)
            return (moved.apply(args[0], sent, received, move), *args[1:])

        return redistribute

    def _move(
        self, name: str, what: str, rows: torch.Tensor, sent: list[int], received: list[int]
    ) -> torch.Tensor:
        self._meet(f"sends {what} of {name}")
        return _exchanged(rows, sent, received)


class _Sums:
    """The sums of gradients of a step: `params` have one each, with those of the same width.

    They are in the order in which all ranks begin them, the last parameters first; a rank takes
    part in those of its layers.
    """

    def __init__(self, model: nn.Module, width_of: Mapping[str, int], groups: Any) -> None:
        rank = dist.get_rank()
        trained = [(width_of[name], p) for name, p in model.named_parameters() if p.requires_grad]
        self.params = [[param] for width, param in reversed(trained) if rank < width]
        self._of = [groups[width] for width, _ in reversed(trained) if rank < width]
        self._left = [param for width, param in trained if rank >= width]
        self._works: list[Any] = []

    def begin_next(self) -> None:
        """The next gradient is there, or is zero."""
        place = len(self._works)
        (param,), group = self.params[place], self._of[place]
        grad = torch.zeros_like(param) if param.grad is None else param.grad
        param.grad = grad.contiguous()
        self._works.append(dist.all_reduce(param.grad, group=group, async_op=True))

    def finish(self) -> None:
        """All are summed after it; a parameter of other ranks has no gradient."""
        while len(self._works) < len(self.params):
            self.begin_next()
        for work in self._works:
            work.wait()
        for param in self._left:
            param.grad = None


class _Moved(torch.autograd.Function):
    """Rows sent to the ranks that have them under another width, and their gradients back."""

    @staticmethod
    def forward(
        ctx: Any,
        rows: torch.Tensor,
        sent: list[int],
        received: list[int],
        move: Callable[..., torch.Tensor],
    ) -> torch.Tensor:
        ctx.splits, ctx.move = (received, sent), move
        return move("rows", rows, sent, received)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        return ctx.move("gradients", gradient, *ctx.splits), None, None, None


def _exchanged(rows: torch.Tensor, sent: list[int], received: list[int]) -> torch.Tensor:
    found = rows.new_empty(sum(received), *rows.shape[1:])
    dist.all_to_all_single(found, rows[: sum(sent)].contiguous(), received, sent)
    return found if len(found) else rows.new_zeros(1, *rows.shape[1:])


def _overlaps(samples: int, rank: int, own: int, others: int, ranks: int) -> list[int]:
    """Of this rank's samples at width `own`, how many each rank has at width `others`."""

    def part(of: int, width: int) -> range:
        return range(of * samples // width, (of + 1) * samples // width) if of < width else range(0)

    mine = part(rank, own)
    each = [part(other, others) for other in range(ranks)]
    return [max(0, min(mine.stop, o.stop) - max(mine.start, o.start)) for o in each]


def burst(model: nn.Module, plan: Any) -> Burst:
    """`model` with its layers by widths: `{"layers.0": 2, "head": 1}`, in the order they run.

    `plan` is that, or the saved answer of `cotrain-compile cluster`, as a path or an `Answer`.
    Every rank calls it, and starts with what rank 0 holds.
    """
    if not dist.is_available() or not dist.is_initialized():
        raise DistributeError(
            "no process group is initialised: start with torchrun, and call "
            "torch.distributed.init_process_group before burst"
        )
    if isinstance(plan, str | os.PathLike):
        plan = files.load(plan, Answer)
    if isinstance(plan, Answer):
        found = [strategy.widths for strategy in plan.strategies if strategy.widths]
        if not found:
            raise OptionError("the plan has no widths; let cotrain-compile cluster judge burst")
        plan = {name: width for name, width in found[0].items() if name not in _NO_MODULES}
    modules = dict(model.named_modules())
    unknown = [name for name in plan if name not in modules]
    bad = [width for width in plan.values() if not 1 <= width <= dist.get_world_size()]
    if unknown or bad or not plan:
        raise OptionError(
            f"widths {dict(plan)}: each is that of a module of the model, from 1 to "
            f"{dist.get_world_size()} ranks; no modules: {unknown}, no widths: {bad}"
        )
    norms = [n for n, m in modules.items() if isinstance(m, nn.modules.batchnorm._BatchNorm)]
    if norms and max(plan.values()) > 1:
        raise DistributeError(
            f"{norms[0]} takes statistics of the whole batch, of which a rank has a part; use "
            "GroupNorm, or width 1 for every layer"
        )
    return Burst(model, plan)


def _widths_of_parameters(
    model: nn.Module, widths: Mapping[str, int], ranks: int
) -> dict[str, int]:
    """Over how many ranks each parameter's gradient is summed; all, outside the planned modules."""
    inside: dict[int, int] = {}
    for name, width in widths.items():
        for param in model.get_submodule(name).parameters():
            inside[id(param)] = max(width, inside.get(id(param), 0))
    outside = {
        id(param)
        for path, param in model.named_parameters(remove_duplicate=False)
        if not any(path.startswith(f"{name}.") for name in widths)
    }
    return {
        name: ranks if id(param) in outside else inside[id(param)]
        for name, param in model.named_parameters()
    }


def _check_samples(samples: int, widths: Mapping[str, int]) -> None:
    several = len(set(widths.values())) > 1
    for name, width in widths.items():
        # Of one row, a sum over layers of two widths would make as many as the other one has.
        if samples % width or (several and samples // width < 2):
            raise DistributeError(
                f"{samples} samples are not shared by the {width} ranks of {name}: each has as "
                "many, and two or more where widths differ; take another batch"
            )


def _start_equal(model: nn.Module) -> None:
    with torch.no_grad():
        for tensor in (*model.parameters(), *model.buffers()):
            whole = tensor.detach().contiguous()
            dist.broadcast(whole, 0)
            tensor.copy_(whole)


@contextmanager
def _exchanges() -> Iterator[None]:
    """Within it ranks exchange: `ExchangeFailed` where one does not come."""
    try:
        yield
    except RuntimeError as error:
        is_lost = isinstance(error, dist.DistError) or "gloo" in str(error)
        if isinstance(error, CotrainError) or not is_lost:
            raise
        raise ExchangeFailed(
            f"another rank has died, hangs, or did not come to this exchange: {first_line(error)}. "
            "Look at the first error of the other ranks; start all ranks again from a checkpoint"
        ) from error

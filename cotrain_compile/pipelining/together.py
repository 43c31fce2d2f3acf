"""Together: ranks train the same, and each step is one of all of them or of none.

They compare what they are set up with, meet before a step is sent anywhere and again when all have
done it, so that a rank that fails in between lets none of them update.

Norms: torch's functions refuse to take that of the gradients of some stages alone.

torch's functions take the norm of what they are given: of a rank's own part it is another one than
without the pipeline, and each stage would be clipped by its own. They are refused by name.

Private torch API used: `torch.nn.utils.clip_grad._get_total_norm`, and that it is a closure over
the function that does the work. Reason: every function of torch's that takes such a norm calls it,
and so do names that a script has imported before. Tried on torch 2.13.0; where a torch has no such
function, nothing is refused.
"""

from __future__ import annotations

import functools
import hashlib
import platform
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from types import CodeType
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.utils import clip_grad

import cotrain_compile
from cotrain_compile import files
from cotrain_compile.cluster.model.layout import StagePlan
from cotrain_compile.distribute.meet import LONGEST, first_line, meeting_of
from cotrain_compile.errors import DistributeError, ExchangeFailed, RanksApart

T = TypeVar("T")
_START_AGAIN = "start all ranks again from a checkpoint"


class StageRanks:
    """All ranks of the process group."""

    def __init__(self) -> None:
        self._meeting = meeting_of(tuple(range(dist.get_world_size())))

    def make(self, made: Callable[[], T], same: Sequence[tuple[str, str]] = ()) -> T:
        """What `made` gives, where it gives something on every rank, and `same` is alike on all.

        `same` has names of what ranks compare, each with what this rank has. Raises its own error,
        or one that tells of the other ranks.
        """
        value: T | None = None
        error: Exception | None = None
        try:
            value = made()
        except Exception as problem:
            error = problem
        told = "sets up its part of the training"
        self._meeting.meet(told, lambda: told, LONGEST)  # others may still plan and compile
        found = self._meeting.gather((tuple(same), None if error is None else str(error)))
        if error is not None:
            raise error
        failed = [f"rank {rank}: {why}" for rank, (_, why) in enumerate(found) if why is not None]
        if failed:
            raise DistributeError("another rank cannot set up its part: " + "; ".join(failed))
        for place, (name, own) in enumerate(same):
            apart = [str(rank) for rank, (other, _) in enumerate(found) if other[place][1] != own]
            if apart:
                raise DistributeError(
                    f"ranks {', '.join(apart)} have another {name} than rank {dist.get_rank()}; "
                    "give all ranks the same plan file, build the same model, and install the same "
                    "versions"
                )
        return cast(T, value)

    def begin(self, does: str) -> None:
        """Return when all ranks are about to do the same; else `RanksApart` on each of them."""
        self._meeting.meet(does, lambda: f"does a {does}")

    @contextmanager
    def exchanges(self, *, early: bool = False) -> Iterator[None]:
        """Within it ranks send and receive: `ExchangeFailed` where one does not come.

        Where updates come `early`, other ranks may have theirs by then.
        """
        try:
            yield
        except RuntimeError as error:
            updated = "Others may have updated in" if early else "No rank has updated anything from"
            raise ExchangeFailed(
                f"another rank has died, or hangs: {first_line(error)}. {updated} "
                f"this step. Look at the first error of the others; {_START_AGAIN}"
            ) from error

    def all_done(
        self, failed: Exception | None, losses: Sequence[float], *, early: bool = False
    ) -> list[list[float]]:
        """The losses that each rank has, when every rank has done the step.

        Where one has `failed`, it raises its error, and all others `RanksApart`: of updates that
        come `early` they have theirs by then.
        """
        if failed is not None:
            # Ranks that share a layer have told each other, and not those of other stages.
            self._meeting.tell_failure(DistributeError(str(failed)) if _is_told(failed) else failed)
            raise failed
        try:
            self._meeting.meet("end of a step", lambda: "has done its part of the step")
        except RanksApart as error:
            if not early:
                raise
            raise RanksApart(
                f"{error}. This rank has updated its stages (just in time), so that these are of "
                f"different steps: {_START_AGAIN}"
            ) from error
        found: list[list[float]] = self._meeting.gather(list(losses))
        return found

    def numbers_of_all(self, number: float) -> list[float]:
        """The number that each rank gives."""
        self.begin("norm of the gradients of a pipeline")
        found: list[float] = self._meeting.gather(number)
        return found

    def tell_of_update(self, error: Exception) -> None:
        """Let the others know that this rank has not updated, when they come to their next step."""
        told = f"its update failed ({error}), so stages are of different steps: "
        self._meeting.tell_failure(DistributeError(told + _START_AGAIN))


def _is_told(failed: Exception) -> bool:
    return isinstance(failed, RanksApart | ExchangeFailed)


def compared(
    model: nn.Module, plan: StagePlan | None, loss_fn: Any, batch: Sequence[torch.Tensor]
) -> list[tuple[str, str]]:
    """What ranks that train the same have alike, by its name."""
    parameters = [f"{name} {tuple(p.shape)} {p.dtype}" for name, p in model.named_parameters()]
    kinds = {type(module): None for module in model.modules()}
    codes = [_code(kind.forward) for kind in kinds]
    versions = (cotrain_compile.__version__, torch.__version__, platform.python_version())
    return [
        ("version of cotrain-compile, torch or Python", " ".join(versions)),
        ("plan", "" if plan is None else files.to_json(plan)),
        ("model", _short(parameters)),
        ("batch", str([(tuple(tensor.shape), str(tensor.dtype)) for tensor in batch])),
        ("code of the model or of the loss", _short([*codes, _code(loss_fn)])),
    ]


def _code(function: Any) -> str:
    """What a function of Python's does, wherever its file is."""
    code = getattr(function, "__code__", None)
    if not isinstance(code, CodeType):
        return str(type(function))
    return f"{code.co_code.hex()} {code.co_names} {[_constant(item) for item in code.co_consts]}"


def _constant(item: Any) -> str:
    if isinstance(item, CodeType):
        return f"{item.co_code.hex()} {item.co_names} {[_constant(one) for one in item.co_consts]}"
    return repr(sorted(item, key=repr) if isinstance(item, frozenset) else item)


def _short(lines: Sequence[str]) -> str:
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()


_of_stages: weakref.WeakSet[nn.Parameter] = weakref.WeakSet()
_takes = False


def refuse_norms_of_parts(parameters: Iterable[nn.Parameter]) -> None:
    """From here on torch's functions refuse to take the norm of the gradients of `parameters`."""
    _of_stages.update(parameters)
    _put_in_place()


@contextmanager
def torch_takes_norms() -> Iterator[None]:
    """Within it they take it: of what a pipeline adds up over its stages."""
    global _takes
    _takes = True
    try:
        yield
    finally:
        _takes = False


@functools.cache
def _put_in_place() -> None:
    for cell in getattr(getattr(clip_grad, "_get_total_norm", None), "__closure__", None) or ():
        if callable(cell.cell_contents):
            cell.cell_contents = _refusing(cell.cell_contents)


def _refusing(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def norm(tensors: Any, *args: Any, **kwargs: Any) -> Any:
        # A step that is compiled has all of its model.
        if _takes or torch.compiler.is_compiling():
            return original(tensors, *args, **kwargs)
        tensors = [tensors] if isinstance(tensors, torch.Tensor) else list(tensors)
        known = {id(param.grad) for param in _of_stages if param.grad is not None}
        if any(id(tensor) in known for tensor in tensors):
            raise DistributeError(
                "clip_grad_norm_ on a rank of a pipeline would clip by the norm of this rank's "
                "part alone, and every rank by another one; call clip_grad_norm(max_norm) of what "
                "pipeline() returned, on every rank: it takes the norm of the whole model"
            )
        return original(tensors, *args, **kwargs)

    return norm

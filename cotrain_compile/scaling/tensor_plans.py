"""Tensor plans: which layers of a model `parallelize_module` splits, and how.

A user gives one, or the model is of Hugging Face, whose models carry theirs in words.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import nn
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel

from cotrain_compile.errors import DistributeError
from cotrain_compile.pipelining.divide import is_called
from cotrain_compile.scaling.experts import ExpertParallel


def _style(word: str) -> ParallelStyle | None:
    match word:
        case "colwise":
            return ColwiseParallel()
        case "rowwise":
            return RowwiseParallel()
        case "colwise_rep" | "colwise_gather_output":
            return ColwiseParallel(output_layouts=Replicate())
        case "embedding_rowwise" | "rowwise_rep":
            return RowwiseParallel(input_layouts=Replicate())
    return None


def tensor_plan_of(
    model: nn.Module, given: Mapping[str, ParallelStyle] | None, *, sequence: bool
) -> dict[str, ParallelStyle]:
    """By name of module, with wildcards, how it is split: what is `given`, or the model's own.

    Raises `DistributeError` where there is neither, where tokens are to be divided too and nothing
    is given, where a name is that of no module, and where a split layer shares its weight with
    another one.
    """
    if given is not None:
        _refuse_unknown(model, given)
        _refuse_shared(model, given)
        return dict(given)
    if sequence:
        raise DistributeError(
            "the plan divides what is between layers by tokens, and nobody knows where in this "
            "model; pass tensor_plan= with SequenceParallel() for its norms, and layouts of what "
            "goes in and out"
        )
    plan = {name: style for name, style in _own_plan(model).items() if not _shared_in(model, name)}
    if not plan:
        raise DistributeError(
            f"the plan divides layers, and {type(model).__name__} does not say which (only models "
            "of Hugging Face with a _tp_plan do); pass tensor_plan=, such as "
            '{"blocks.*.up": ColwiseParallel(), "blocks.*.down": RowwiseParallel()}'
        )
    return plan


def expert_plan_of(model: nn.Module, experts: Sequence[str]) -> dict[str, ParallelStyle]:
    """By name of module of experts how it is divided; names may have wildcards.

    Raises `DistributeError` where there are none, or no such modules, or they share a weight.
    """
    if not experts:
        raise DistributeError(
            "the plan divides experts, and nobody knows which modules have them; pass experts=, "
            'such as ["layers.*.experts"]: modules that map rows of tokens (experts, tokens, '
            "width), with parameters of a row for each expert"
        )
    plan: dict[str, ParallelStyle] = {name: ExpertParallel() for name in experts}
    _refuse_unknown(model, plan)
    _refuse_shared(model, plan)
    return plan


def _own_plan(model: nn.Module) -> dict[str, ParallelStyle]:
    """Of the outermost modules that have one."""
    found: dict[str, ParallelStyle] = {}
    done: list[str] = []
    for prefix, module in model.named_modules():
        words = getattr(module, "_tp_plan", None)
        if not words or any(prefix.startswith(outer) for outer in done):
            continue
        done.append(f"{prefix}." if prefix else "")
        for name, word in words.items():
            style = _style(word)
            if style is None:
                raise DistributeError(
                    f"{type(module).__name__} splits {name} as {word!r}, which no style of torch's "
                    "is known for; pass tensor_plan="
                )
            found[f"{done[-1]}{name}"] = style
    return found


def _refuse_unknown(model: nn.Module, plan: Mapping[str, ParallelStyle]) -> None:
    known = [name for name, _ in model.named_modules()]
    for pattern in plan:
        if not any(is_called(name, pattern) for name in known):
            raise DistributeError(
                f"{pattern} is to be split, and {type(model).__name__} has no such module; "
                "take names as in model.named_modules(), with * for any one part of a name"
            )


def _refuse_shared(model: nn.Module, plan: Mapping[str, ParallelStyle]) -> None:
    for pattern in plan:
        for name, other in _shared_in(model, pattern):
            raise DistributeError(
                f"{name} is to be split and shares its weight with {other}, which would train one "
                "of its own; untie them (tie_word_embeddings=False in a configuration of Hugging "
                f"Face), or leave {pattern} whole"
            )


def _shared_in(model: nn.Module, pattern: str) -> list[tuple[str, str]]:
    """Parameters in modules of that name that are elsewhere too, each with the other name."""
    names: dict[int, list[str]] = {}
    for name, param in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(param), []).append(name)
    return [
        (name, next(other for other in all_names if other != name))
        for all_names in names.values()
        if len(all_names) > 1
        for name in all_names
        if is_called(name.rpartition(".")[0], pattern)
    ]

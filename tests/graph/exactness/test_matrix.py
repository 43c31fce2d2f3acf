"""A sample of the matrix of models, optimizers and idioms that `bench.matrix.matrix` runs whole."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from bench.matrix import steps as matrix_steps
from bench.matrix.causes import no_digit, other_way
from bench.matrix.matrix import CALLS, Cell, cells, evaluate, sample
from bench.matrix.steps import ARCHITECTURES, IDIOMS, OPTIMIZERS
from cotrain_compile.capture.dynamo import patches as dynamo_patches

IN_CI = sample(1, seed=1)


def marked(cell: Cell) -> object:
    return pytest.param(cell, id=" ".join(cell), marks=() if cell in IN_CI else pytest.mark.long)


@pytest.mark.filterwarnings("ignore::UserWarning:transformers.*")
@pytest.mark.parametrize("cell", [marked(cell) for cell in cells()])
def test_a_cell_gives_eagers_numbers_or_a_way_to_go_on(cell: Cell) -> None:
    result = evaluate(cell)
    if result.status == "refused":
        assert "Nothing was updated." in result.message
    else:
        assert result.status in ("equal", "rounding"), result


def test_a_gradient_with_right_digits_explains_no_difference() -> None:
    """Of the biases of GPT-2's attention the keys' are rounding, those beside them are not."""
    cell, name = ("gpt2", "Adagrad", "GradScaler"), "transformer.h.0.attn.c_attn.bias"
    third = torch.arange(48) // 16
    queries, keys, values = (no_digit(cell, name, "parameter", third == n) for n in range(3))
    assert keys.is_rounding
    assert not queries.is_rounding
    assert not values.is_rounding


SHARED_KEYS = ("llama", "Adagrad", "autocast")


@pytest.mark.long
@pytest.mark.filterwarnings("ignore::UserWarning:transformers.*")
def test_a_model_that_takes_another_way_in_a_trace_differs_by_rounding(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(dynamo_patches, "known_in_trace", lambda *_: None)
    result = evaluate(SHARED_KEYS)
    assert result.tensor_difference > 0.5
    assert result.status == "rounding"
    assert "another way where it is traced" in result.message


@pytest.mark.filterwarnings("ignore::UserWarning:transformers.*")
def test_a_model_that_takes_eagers_way_in_the_trace_is_equal() -> None:
    assert evaluate(SHARED_KEYS).status == "equal"


@pytest.mark.filterwarnings("ignore::UserWarning:transformers.*")
def test_a_way_with_other_gradients_is_no_rounding(monkeypatch: pytest.MonkeyPatch) -> None:
    right = matrix_steps.loss_of("vit")

    def halves_gradients_in_a_trace(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        loss = right(model, x, y)
        return (loss + loss.detach()) / 2 if torch.compiler.is_compiling() else loss

    monkeypatch.setattr(matrix_steps, "loss_of", lambda _: halves_gradients_in_a_trace)
    cause = other_way(("vit", "SGD", "autocast"), loss=0.0, tensor=0.0)
    assert cause.apart > 10
    assert not cause.is_rounding


@pytest.mark.filterwarnings("ignore::UserWarning:transformers.*")
def test_a_model_that_warns_while_it_is_traced_trains_as_in_eager() -> None:
    """Hugging Face's own loss of a GPT-2 whose configuration names none."""
    assert evaluate(("gpt2", "SGD", "own loss")).status == "equal"


def test_a_sample_has_every_value_of_every_axis() -> None:
    models, optimizers, idioms = map(set, zip(*sample(40), strict=True))
    assert models == set(ARCHITECTURES)
    assert optimizers == set(OPTIMIZERS)
    assert idioms == set(IDIOMS)
    assert CALLS >= 3  # across calls, the third one updates

"""Idioms that ask torch for what depends on values, and the programs without that."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bench.idioms.refusals import followed
from bench.idioms.registry import Training, mlp, mse, refused, regression, sgd


def _likelihood(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    mean, raw = model(x).chunk(2, -1)
    variance = F.softplus(raw) + 1e-3
    return 0.5 * (variance.log() + (y[:, :2] - mean).pow(2) / variance).mean()


@refused(r"torch\.where|outside", followed(_likelihood))
def gaussian_likelihood() -> Training:
    def loss(m: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        mean, raw = m(x).chunk(2, -1)
        return F.gaussian_nll_loss(mean, y[:, :2], F.softplus(raw) + 1e-3)

    return followed(loss)()


def _covariance(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    out = model(x)
    off = out - out.mean(0)
    return F.mse_loss(out, y) + (off.T @ off / (len(x) - 1)).triu(1).pow(2).sum()


@refused(r"torch\.where|outside", followed(_covariance))
def covariance_penalty() -> Training:
    def loss(m: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        out = m(x)
        return F.mse_loss(out, y) + torch.cov(out.T).triu(1).pow(2).sum()

    return followed(loss)()


def _normalised(momentum: float | None) -> Any:
    def make() -> nn.Module:
        norm = nn.BatchNorm1d(8, momentum=momentum)
        return nn.Sequential(nn.Linear(6, 8), norm, nn.ReLU(), nn.Linear(8, 4)).double()

    return make


@refused(r"torch\.where|outside", followed(make_model=_normalised(0.1)))
def cumulative_batch_norm() -> Training:
    return followed(make_model=_normalised(None))()


def _averaged(*, in_step: bool) -> Any:
    def make() -> Training:
        model = mlp()
        optimizer = sgd(model)
        average = torch.optim.swa_utils.AveragedModel(model)

        def step(x: Tensor, y: Tensor) -> Tensor:
            optimizer.zero_grad()
            loss = mse(model, x, y)
            loss.backward()
            optimizer.step()
            if in_step:
                average.update_parameters(model)
            return loss

        return Training(step, regression(), [model, optimizer])

    return make


@refused(r"after the step|outside", _averaged(in_step=False))
def weight_averages_by_swa_utils() -> Training:
    return _averaged(in_step=True)()


def _shrunk(*, by_vector: bool) -> Any:
    def make() -> Training:
        model = mlp()
        optimizer = sgd(model)

        def step(x: Tensor, y: Tensor) -> Tensor:
            optimizer.zero_grad()
            loss = mse(model, x, y)
            loss.backward()
            optimizer.step()
            with torch.no_grad():
                params = list(model.parameters())
                vector = nn.utils.parameters_to_vector(params) * 0.99
                if by_vector:
                    nn.utils.vector_to_parameters(vector, params)
                    return loss
                parts = vector.split([p.numel() for p in params])
                for p, part in zip(params, parts, strict=True):
                    p.copy_(part.view_as(p))
            return loss

        return Training(step, regression(), [model, optimizer])

    return make


@refused(r"vector_to_parameters", _shrunk(by_vector=False))
def vector_round_trip() -> Training:
    return _shrunk(by_vector=True)()


def _solved(solve: Any) -> Any:
    def loss(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        features = model(x)
        gram = features.T @ features + 0.1 * torch.eye(4, dtype=x.dtype)
        return F.mse_loss(features @ solve(gram, features.T @ y), y)

    return loss


def _by_inverse(inverse: Any) -> Any:
    return _solved(lambda gram, right: inverse(gram) @ right)


def _by_factor(factor: Any) -> Any:
    return _solved(lambda gram, right: torch.cholesky_solve(right, factor(gram)))


@refused(
    r"torch\.linalg\.solve_ex\(\.\.\.\)\[0\]",
    followed(_solved(lambda a, b: torch.linalg.solve_ex(a, b)[0])),
)
def least_squares_solve() -> Training:
    return followed(_solved(torch.linalg.solve))()


@refused(r"torch\.linalg\.inv_ex", followed(_by_inverse(lambda a: torch.linalg.inv_ex(a)[0])))
def least_squares_by_an_inverse() -> Training:
    return followed(_by_inverse(torch.linalg.inv))()


@refused(
    r"torch\.linalg\.cholesky_ex", followed(_by_factor(lambda a: torch.linalg.cholesky_ex(a)[0]))
)
def least_squares_by_a_factor() -> Training:
    return followed(_by_factor(torch.linalg.cholesky))()


def _embedded(*, by_itself: bool) -> Any:
    def make() -> Training:
        words = nn.Embedding(16, 8, max_norm=1.0 if by_itself else None)
        model = nn.Sequential(words, nn.Tanh(), nn.Linear(8, 16)).double()
        optimizer = sgd(model)

        def step(x: Tensor, y: Tensor) -> Tensor:
            optimizer.zero_grad()
            if not by_itself:
                with torch.no_grad():
                    rows, weight = x.flatten(), words.weight
                    weight.index_copy_(0, rows, torch.renorm(weight[rows], 2, 0, 1.0))
            loss = F.cross_entropy(model(x).flatten(0, -2), y.flatten())
            loss.backward()
            optimizer.step()
            return loss

        batches = [(torch.randint(0, 16, (8,)), torch.randint(0, 16, (8,))) for _ in range(4)]
        return Training(step, batches, [model, optimizer])

    return make


@refused(r"index_copy_\(0, rows", _embedded(by_itself=False))
def embedding_with_max_norm() -> Training:
    return _embedded(by_itself=True)()

"""What a step logs or warns of is said once, while it is traced, and the step trains."""

from __future__ import annotations

import functools
import logging
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from cotrain_compile.errors import CaptureError

LOG = logging.getLogger("a_library")
ADAPTER = logging.LoggerAdapter(LOG, {})
Tells = Callable[[Tensor], Any]


@functools.lru_cache(None)
def warning_once(logger: logging.Logger, message: str) -> None:
    logger.warning(message)


@functools.lru_cache(None)
def deprecated() -> None:
    warnings.warn("old", FutureWarning, stacklevel=2)


def log_shapes(x: Tensor) -> None:
    LOG.warning("%d rows", x.shape[0])
    LOG.info(f"of {x.dtype}")
    LOG.log(logging.ERROR, "third")


def log_in_a_loop(x: Tensor) -> None:
    for number in range(2):
        LOG.warning("round %d", number)


def log_by_an_adapter(x: Tensor) -> None:
    ADAPTER.warning("adapted")


def log_if_enabled(x: Tensor) -> None:
    if LOG.isEnabledFor(logging.DEBUG) or LOG.level > logging.INFO:
        raise ValueError(LOG.name)
    LOG.debug("the value %s", x)  # a tensor, but nobody sees it
    logging.getLogger("a_library.part").warning("enabled")


def train(tells: Tells, *, compiled: bool = True) -> None:
    torch.manual_seed(0)
    model = nn.Linear(4, 2)
    optimizer = torch.optim.AdamW(model.parameters())

    def step(x: Tensor) -> Tensor:
        optimizer.zero_grad()
        tells(x)
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        return loss.detach()  # type: ignore[no-any-return]

    if compiled:
        step = torch.compile(step, backend="cotrain", options={"quiet": True})
    assert step(torch.ones(2, 4)) > step(torch.ones(2, 4))


@pytest.mark.parametrize("tells", [log_shapes, log_in_a_loop, log_by_an_adapter, log_if_enabled])
def test_what_eager_logs_in_a_call_is_logged_once(
    tells: Tells, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "a_library")
    train(tells, compiled=False)
    eager = said(caplog)
    train(tells)
    assert said(caplog) == eager[: len(eager) // 2]


def said(caplog: pytest.LogCaptureFixture) -> list[tuple[object, ...]]:
    ours = [r for r in caplog.records if r.name.startswith("a_library")]
    caplog.clear()
    return [(r.levelno, r.getMessage(), r.pathname, r.lineno, r.funcName) for r in ours]


def test_a_method_that_a_library_gave_to_loggers(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logging.Logger, "warning_once", warning_once, raising=False)
    train(lambda x: LOG.warning_once("only once"))  # type: ignore[attr-defined]
    assert [r.getMessage() for r in caplog.records if r.name == "a_library"] == ["only once"]


@pytest.mark.filterwarnings("ignore:Dynamo detected a call to a `functools.lru_cache`")
def test_a_warning_is_of_the_line_that_eager_names() -> None:
    def tells(x: Tensor) -> None:
        warnings.warn("plain")  # noqa: B028
        warnings.warn(RuntimeWarning("made"), stacklevel=2)
        deprecated()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            warnings.warn("silent", stacklevel=1)

    eager = warned(lambda: train(tells, compiled=False))
    deprecated.cache_clear()
    found = [w for w in warned(lambda: train(tells)) if "Dynamo detected" not in str(w[1])]
    assert {w[1] for w in eager} == {"plain", "made", "old"}
    assert found == eager[: len(found)]
    assert len(found) == 3


def warned(run: Callable[[], None]) -> list[tuple[object, ...]]:
    globals().get("__warningregistry__", {}).clear()
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("default")
        run()
    return [(w.category, str(w.message), w.filename, w.lineno) for w in seen]


def test_a_warning_that_is_an_error_is_one_in_the_trace_too() -> None:
    def tells(x: Tensor) -> None:
        warnings.warn("not here", stacklevel=1)

    with pytest.raises(UserWarning, match="not here"):
        train(tells)


def test_a_tensor_is_not_logged() -> None:
    with pytest.raises(CaptureError, match=r"Log outside the step what it returns; the value of"):
        train(lambda x: LOG.warning("the value %s", x))

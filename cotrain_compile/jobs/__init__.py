"""Jobs: a user's file that builds a training step, named as `FILE.py:FUNCTION`.

Beside them, what may be asked of a job that `config_job` makes from a configuration.
"""

from __future__ import annotations

import importlib.util
import inspect
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

from cotrain_compile.errors import CotrainError, OptionError, did_you_mean

OptimizerName = Literal["adamw", "adam", "sgd", "adafactor"]
Precision = Literal["bf16-mixed", "bf16", "fp32"]

# What to do about an error of a function that builds a step, by words in it.
_WAYS_ON = (
    (
        ("support for cuda devices", "compiled with CUDA", "NVIDIA driver"),
        "trace it with --device cuda, or for a --machine with a card: neither needs one here",
    ),
    (
        ("DataDependentOutputException",),
        "tensors have no values while a step is traced: leave out what reads one",
    ),
)


def is_file_job(job: str) -> bool:
    """Whether `job` is meant as `FILE.py:FUNCTION`, and not as a configuration."""
    return ".py" in Path(job).name


def load_job(job: str) -> Callable[[], tuple[Callable[..., Any], tuple[Any, ...]]]:
    """The function that a job names. Its file is executed, because the user asked for it.

    It may import its neighbours, as a script can. Called without arguments, it must return the step
    function and a tuple of example arguments. Raises `OptionError` when there is no such file or
    function, or the file cannot be executed.
    """
    file, colon, name = job.rpartition(":")
    path = Path(file)
    if not colon or not name or not path.is_file():
        raise OptionError(f"job {job!r}: name an existing file and a function, as job.py:build")
    spec = importlib.util.spec_from_file_location(path.stem, path)
    if spec is None or spec.loader is None:
        raise OptionError(f"job {job!r}: {path} is not a Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module
    folder = str(path.parent.resolve())
    if folder not in sys.path:
        sys.path.insert(0, folder)
    try:
        spec.loader.exec_module(module)
    except SystemExit as error:
        raise _ended(error, job, path) from error
    except Exception as error:
        raise OptionError(
            f"job {job!r}: {_place(error, path)} raises {type(error).__name__}: {error}; "
            f"`python {path}` shows all of it"
        ) from error
    build = getattr(module, name, None)
    if not callable(build):
        meant = did_you_mean(name, (n for n, value in vars(module).items() if callable(value)))
        raise OptionError(f"job {job!r}: {path} has no function {name!r}{meant}")
    _refuse_arguments(build, job)
    return lambda: _built(build, job, path)


def _built(
    build: Callable[..., Any], job: str, path: Path
) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """What `build` returns; an error of it names the line, and how to go on."""
    try:
        built = build()
    except CotrainError:
        raise
    except SystemExit as error:
        raise _ended(error, job, path) from error
    except Exception as error:
        kind = type(error).__name__
        way = next(
            (way for words, way in _WAYS_ON if any(word in f"{kind}: {error}" for word in words)),
            f'`python -c "import {path.stem}; {path.stem}.{build.__name__}()"` shows all of it',
        )
        told = f"job {job!r}: {_place(error, path)} raises {kind}: {error}"
        raise OptionError(f"{told}; {way}") from error
    return _checked(built, job)


def _refuse_arguments(build: Callable[..., Any], job: str) -> None:
    """Raise `OptionError` where `build` wants arguments, as the step itself does."""
    if lacking := _refusal(build):
        raise OptionError(
            f"job {job!r}: it is called without arguments, but {lacking}; name a function that "
            "returns (step, arguments)"
        )


def _refusal(function: Callable[..., Any], *arguments: object) -> str:
    """Why `function` cannot be called with `arguments`; empty where it can, or does not say."""
    try:
        inspect.signature(function).bind(*arguments)
    except TypeError as error:
        return str(error)
    except ValueError:  # a callable that does not say what it takes
        return ""
    return ""


def _ended(error: SystemExit, job: str, path: Path) -> OptionError:
    """What to say of a file that ends the process, as a script may that runs its own training."""
    return OptionError(
        f"job {job!r}: {_place(error, path)} calls sys.exit({error.code!r}); a job only builds the "
        "step: put what ends the program below `if __name__ == '__main__':`"
    )


def _place(error: BaseException, path: Path) -> str:
    """The file and the line of it that an error came by, where it began to run at all."""
    frames = traceback.extract_tb(error.__traceback__)
    lines = [frame.lineno for frame in frames if Path(frame.filename) == path.resolve()]
    return f"{path}:{lines[-1]}" if lines else str(path)


def _checked(built: object, job: str) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    if isinstance(built, tuple) and len(built) == 2:
        step, arguments = built
        if callable(step) and isinstance(arguments, tuple):
            if lacking := _refusal(step, *arguments):
                raise OptionError(
                    f"job {job!r}: its step cannot be called with the {len(arguments)} arguments "
                    f"that it returns: {lacking}"
                )
            return step, arguments
    raise OptionError(f"job {job!r} must return (step, arguments), a function and a tuple")

"""The steps that `bench.plans.plans` plans: jobs of `docs/examples` at several batch sizes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cotrain_compile.dataflow import Dataflow
from cotrain_compile.entry.tracing import trace
from cotrain_compile.files import load, save
from cotrain_compile.jobs import load_job

EXAMPLES = Path("docs/examples")


@dataclass(frozen=True)
class Shape:
    """A job at a batch size. Sequences are as long as the job has them."""

    model: str
    job: str
    batch: int
    length: int

    @property
    def name(self) -> str:
        """As tables have it."""
        return f"{self.model}, {self.batch} × {self.length}"

    @property
    def is_smallest(self) -> bool:
        """Whether no shape of the same model has a smaller batch."""
        return all(self.batch <= shape.batch for shape in SHAPES if shape.model == self.model)

    @property
    def file_name(self) -> str:
        """Of the saved step."""
        return f"{self.job.rpartition(':')[2]}_{self.batch}.json"


# From small to large: of the shapes of a model the smallest batch comes first.
SHAPES = (
    Shape("GPT-2 124M", "gpt2.py:gpt2_124m", 8, 1024),
    Shape("GPT-2 124M", "gpt2.py:gpt2_124m", 32, 1024),
    Shape("Llama 1B", "llama.py:llama_1b", 2, 2048),
    Shape("Llama 1B", "llama.py:llama_1b", 8, 2048),
    Shape("Llama 7B", "llama.py:llama_7b", 1, 2048),
    Shape("Llama 7B", "llama.py:llama_7b", 4, 2048),
    Shape("Llama 13B", "llama.py:llama_13b", 2, 2048),
    Shape("Llama 70B", "llama.py:llama_70b", 1, 2048),
)


def step_of(shape: Shape, folder: Path | None = None) -> Dataflow:
    """The traced step of `shape`: read from `folder` where it is, else traced and kept there."""
    kept = folder / shape.file_name if folder is not None else None
    if kept is not None and kept.exists():
        return load(kept, Dataflow)
    dataflow = trace(with_batch(load_job(f"{EXAMPLES}/{shape.job}"), shape.batch))
    if kept is not None:
        kept.parent.mkdir(parents=True, exist_ok=True)
        save(dataflow, kept)
    return dataflow


def with_batch(build: Callable[[], tuple[Any, tuple[Any, ...]]], batch: int) -> Callable[[], Any]:
    """The job `build` on `batch` sequences of its tokens."""

    def build_again() -> tuple[Any, tuple[Any, ...]]:
        step, (tokens,) = build()
        return step, (tokens.new_zeros(batch, tokens.shape[1]),)

    return build_again

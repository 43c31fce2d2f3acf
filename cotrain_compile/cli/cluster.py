"""Cluster: which way to train a model on many machines, as a table or as JSON."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from textwrap import fill
from typing import Annotated

import typer
from rich.table import Table

from cotrain_compile import files
from cotrain_compile.cli.terminal import Json, console, keep_stdout_for, print_json
from cotrain_compile.cluster.cluster_presets import find_cluster
from cotrain_compile.cluster.description import Cluster
from cotrain_compile.cluster.profile_files import read_profile
from cotrain_compile.cluster.profiles import LayerProfile
from cotrain_compile.cluster.strategy import Answer
from cotrain_compile.dataflow import Dataflow
from cotrain_compile.viz.strategies import cells, headings, sentence

_WIDTH = 100


def cluster(
    file: Annotated[
        Path, typer.Argument(help="Layer profile, or step.json traced with --dynamic.")
    ],
    cluster: Annotated[str, typer.Option(help="Preset or cluster.json.")],
    samples: Annotated[int, typer.Option(min=1, help="Of a step, over all devices.")] = 32,
    strategies: Annotated[
        str | None, typer.Option(help="A few in place of all, as replicate,shard.")
    ] = None,
    batch_symbols: Annotated[
        str, typer.Option(help="Of a step: the sizes that count samples, as s77,s17.")
    ] = "",
    tokens_per_sample: Annotated[int, typer.Option(min=1, help="Of a step.")] = 1,
    as_json: Json = False,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="Also save the answer, for `show`.")
    ] = None,
    page: Annotated[
        Path | None, typer.Option(help="Also write it as a page, with timelines.")
    ] = None,
) -> None:
    """Rank the ways to train a model on a cluster; nothing is run."""
    from cotrain_compile.cluster.strategies import STRATEGIES, answer

    keep_stdout_for(as_json, output, page)
    for path in filter(None, (output, page)):
        files.refuse_unwritable(path)
    target = find_cluster(cluster)
    names = [name.strip() for name in strategies.split(",")] if strategies else STRATEGIES
    profile = _profile(file, target, batch_symbols, tokens_per_sample)
    found = answer(profile, target, samples, names)
    if output is not None:
        files.save(found, output)
    if page is not None:
        from cotrain_compile.viz.report.cluster_page import write_cluster_page

        write_cluster_page(page, found, profile)
    if as_json:
        print_json(found.figures())
        return
    print_answer(found)
    for path in filter(None, (output, page)):
        console.print(f"saved {path}")


def print_answer(found: Answer) -> None:
    """The table of all strategies, then what is said of each, then what is assumed."""
    console.print(_table(found), soft_wrap=False)
    for line in _lines(found):
        console.print(line)


def _profile(file: Path, target: Cluster, symbols: str, tokens_per_sample: int) -> LayerProfile:
    """A profile as it is, or that of a step on the devices of the cluster."""
    if files.kind_of(file) != "dataflow":
        return read_profile(file)
    step = files.load(file, Dataflow)
    given = [symbol.strip() for symbol in symbols.split(",") if symbol.strip()]
    from cotrain_compile.cluster.step_on_cluster import profile_on_cluster

    return profile_on_cluster(file.stem, step, target, given, tokens_per_sample=tokens_per_sample)


def _table(found: Answer) -> Table:
    table = Table(box=None, pad_edge=False)
    table.add_column(no_wrap=True)
    *numbers, last = headings(found)
    for heading in numbers:
        table.add_column(heading, justify="right")
    table.add_column(last)
    for strategy in found.strategies:
        table.add_row(*cells(strategy))
    return table


def _lines(found: Answer) -> Iterator[str]:
    """What is said of each strategy, then what is assumed."""
    yield ""
    for strategy in found.strategies:
        text = f"{strategy.name}: {sentence(strategy, found)}"
        yield fill(text, _WIDTH, subsequent_indent="  ")
    yield ""
    for assumed in found.assumed:
        yield fill(f"- {assumed}", _WIDTH, subsequent_indent="  ")

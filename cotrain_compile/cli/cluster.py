"""Cluster: which way to train a model on many machines, as a table or as JSON."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from textwrap import fill
from typing import Annotated

import typer
from rich.table import Table

from cotrain_compile import files
from cotrain_compile.cli.terminal import console
from cotrain_compile.cluster.cluster_presets import find_cluster
from cotrain_compile.cluster.description import Cluster
from cotrain_compile.cluster.profile_files import read_profile
from cotrain_compile.cluster.profiles import LayerProfile
from cotrain_compile.cluster.strategies import STRATEGIES, answer
from cotrain_compile.cluster.strategy import Answer, Strategy
from cotrain_compile.dataflow import Dataflow
from cotrain_compile.units import format_bytes, format_seconds

_HEADINGS = ("step", "at least", "peak", "devices", "traffic")
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
    as_json: Annotated[bool, typer.Option("--json", help="All figures as JSON.")] = False,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="Also save the answer, for `show`.")
    ] = None,
) -> None:
    """Rank the ways to train a model on a cluster; nothing is run."""
    if output is not None:
        files.refuse_unwritable(output)
    target = find_cluster(cluster)
    names = [name.strip() for name in strategies.split(",")] if strategies else STRATEGIES
    profile = _profile(file, target, batch_symbols, tokens_per_sample)
    found = answer(profile, target, samples, names)
    if output is not None:
        files.save(found, output)
    if as_json:
        print(json.dumps(asdict(found), indent=1))
        return
    print_answer(found)
    if output is not None:
        console.print(f"saved {output}")


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
    counted = any(one.tokens_per_s != one.samples_per_s for one in found.strategies)
    for heading in (*_HEADINGS, "tokens/s" if counted else "samples/s"):
        table.add_column(heading, justify="right")
    table.add_column("fits")
    for strategy in found.strategies:
        table.add_row(*_cells(strategy))
    return table


def _cells(strategy: Strategy) -> Iterator[str]:
    yield strategy.name
    for seconds in (strategy.step_s, strategy.bound_s):
        yield "-" if seconds is None else format_seconds(seconds)
    yield format_bytes(max(strategy.peak_bytes)) if strategy.peak_bytes else "-"
    yield str(strategy.devices or "-")
    yield format_bytes(sum(strategy.traffic.values())) if strategy.step_s is not None else "-"
    rate = strategy.tokens_per_s
    yield "-" if rate is None else f"{rate:,.0f}" if rate >= 100 else f"{rate:.1f}"
    unknown = "-" if strategy.step_s is None else "unknown"
    yield {True: "yes", False: "no", None: unknown}[strategy.fits]


def _lines(found: Answer) -> Iterator[str]:
    """Of each strategy what was chosen, why it is not the best, and how to run it."""
    yield ""
    for strategy in found.strategies:
        why = strategy.loses or ("the best" if strategy is found.best else strategy.reason)
        if strategy.step_s is not None and strategy.reason and strategy.reason not in why:
            why += f"; {strategy.reason}"
        parts = [strategy.setting, why]
        parts += [f"run: {strategy.run}"] if strategy.step_s is not None else []
        text = "; ".join(part for part in parts if part)
        yield fill(f"{strategy.name}: {text}", _WIDTH, subsequent_indent="  ")
    yield ""
    for assumed in found.assumed:
        yield fill(f"- {assumed}", _WIDTH, subsequent_indent="  ")

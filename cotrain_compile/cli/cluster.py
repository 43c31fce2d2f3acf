"""Cluster: which way to train a model on many machines, as a table or as JSON."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from textwrap import fill
from typing import TYPE_CHECKING, Annotated

import typer
from rich.table import Table

from cotrain_compile import files
from cotrain_compile.cli.parameters import refuse_outputs
from cotrain_compile.cli.terminal import Json, console, keep_stdout_for, print_json
from cotrain_compile.cluster.model.description import Cluster
from cotrain_compile.cluster.model.profiles import LayerProfile
from cotrain_compile.cluster.model.strategy import Answer
from cotrain_compile.cluster.sources.cluster_presets import find_cluster
from cotrain_compile.cluster.sources.profile_files import read_profile, with_layers
from cotrain_compile.dataflow import Dataflow
from cotrain_compile.errors import OptionError
from cotrain_compile.viz.strategies import HOW_TO_READ, cells, details, headings, title, verdict
from cotrain_compile.viz.text.terminal import PlainConsole

if TYPE_CHECKING:
    from cotrain_compile.cluster.ranks.rank_plan import NoRankPlan, RankPlan

# Where nobody knows how wide a terminal is; a figure and its unit stay on a line.
_WIDTH = 100
# Commands and names are copied from here: no line ends within one.
_filled = partial(fill, width=_WIDTH, subsequent_indent="  ", break_on_hyphens=False)


ModelFile = Annotated[
    Path, typer.Argument(help="A profile of layers, or a step.json traced with --dynamic.")
]
ClusterName = Annotated[str, typer.Option(help="A preset, as 8xh100, or a cluster.json.")]
Samples = Annotated[int, typer.Option(min=1, help="Samples in a step, over all devices.")]
Strategies = Annotated[str | None, typer.Option(help="Rank only these, as replicate,shard.")]
BatchSymbols = Annotated[
    str, typer.Option(help="The symbols of a step that count samples, as s77,s17.")
]
TokensPerSample = Annotated[int, typer.Option(min=1, help="Tokens in a sample of a step.")]
Layers = Annotated[
    int | None,
    typer.Option(
        min=3,
        help="As many numbered layers as this, of a profile or step that has four or more.",
    ),
]
Output = Annotated[
    Path | None,
    typer.Option("--output", "-o", help="Also save the answer into this file, for `show`."),
]
Page = Annotated[
    Path | None, typer.Option(help="Also write it into this HTML file, with timelines.")
]
RankPlanFile = Annotated[
    Path | None,
    typer.Option(
        help="Also have the solver plan one rank of a step tensor by tensor, as shard or "
        "replicate, whichever ranks first, into this plan.json."
    ),
]


def cluster(
    file: ModelFile,
    cluster: ClusterName,
    samples: Samples = 32,
    strategies: Strategies = None,
    batch_symbols: BatchSymbols = "",
    tokens_per_sample: TokensPerSample = 1,
    layers: Layers = None,
    as_json: Json = False,
    output: Output = None,
    page: Page = None,
    rank_plan: RankPlanFile = None,
) -> None:
    """Rank the ways to train a model on a cluster; nothing is run."""
    from cotrain_compile.cluster.answer.strategies import STRATEGIES, answer

    asked = {"--output": output, "--page": page, "--rank-plan": rank_plan}
    keep_stdout_for(as_json, *asked.values())
    saved = {name: path for name, path in asked.items() if path}
    refuse_outputs(asked, (file, cluster))
    target, symbols = find_cluster(cluster), _listed(batch_symbols)
    if rank_plan and layers is not None:
        raise OptionError("--rank-plan plans the step as it was traced; leave out --layers")
    step, profile = _read(file, target, symbols, tokens_per_sample)
    profile = profile if layers is None else with_layers(profile, layers)
    if rank_plan and step is None:
        raise OptionError(f"--rank-plan plans a traced step, and {file} is a profile")
    names = STRATEGIES if strategies is None else _listed(strategies)
    found = answer(profile, target, samples, names)
    rank = _planned(step, target, found, symbols) if rank_plan and step else None
    if rank_plan and rank:
        if rank.plan:
            files.save(rank.plan, rank_plan)
        else:
            del saved["--rank-plan"]
    if output is not None:
        files.save(found, output)
    if page is not None:
        from cotrain_compile.viz.report.cluster_page import write_cluster_page

        write_cluster_page(page, found, profile)
    if as_json:
        print_json(found.figures() | ({"rank_plan": rank.figures()} if rank else {}))
        return
    print_answer(found)
    if rank:
        console.print(_filled(str(rank)))
    for path in saved.values():
        console.print(f"saved {path}")


def _listed(names: str) -> list[str]:
    return [name.strip() for name in names.split(",") if name.strip()]


def _read(
    file: Path, target: Cluster, symbols: Sequence[str], tokens_per_sample: int
) -> tuple[Dataflow | None, LayerProfile]:
    """A profile as it is, or a step with that of its layers on the devices of the cluster."""
    if files.kind_of(file) != "dataflow":
        return None, read_profile(file)
    from cotrain_compile.cluster.sources.traced_profile import profile_on_cluster

    step = files.load(file, Dataflow)
    return step, profile_on_cluster(
        file.stem, step, target, symbols, tokens_per_sample=tokens_per_sample
    )


def _planned(
    step: Dataflow, target: Cluster, found: Answer, symbols: Sequence[str]
) -> RankPlan | NoRankPlan:
    from cotrain_compile.cluster.ranks.rank_plan import plan_answered_rank

    return plan_answered_rank(found, step, target, symbols)


def print_answer(found: Answer) -> None:
    """The table of all strategies, then what is said of each, then what is assumed."""
    console.print(_filled(title(found)))
    wide = PlainConsole(
        file=console.file, width=max(console.width, _WIDTH)
    )  # figures stay on a line
    wide.print(_table(found), crop=False)
    for line in _lines(found):
        console.print(line)


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
    """Why nothing fits, what is said of each strategy, then what is assumed."""
    yield ""
    if found.why_none:
        yield _filled(found.why_none)
        yield ""
    for strategy in found.strategies:
        yield _filled(f"{strategy.name}: {verdict(strategy, found)}")
        for detail in details(strategy):
            yield _filled(detail, initial_indent="  ", subsequent_indent="    ")
    yield ""
    for assumed in (HOW_TO_READ, *found.assumed):
        yield _filled(f"- {assumed}")

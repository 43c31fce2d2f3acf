"""How should a large model be trained on these machines? The one answer for six clusters.

Llama 7B, 13B, 70B and a mixture of experts with Mixtral's sizes, 256 sequences of 2048 tokens a
step, bfloat16 autocast (float16 on V100), AdamW, clipping: all strategies of `cotrain-compile
cluster`, the best one first. Seconds are a roofline's; nothing is run. Of each model four layers
are traced with a symbolic batch, and the inner ones repeated.

A row is a model on a cluster; rows that the output has already are left alone.

    python -m bench.cluster.six_clusters -o bench/results/six_clusters.json
    python -m bench.cluster.six_clusters -o six_clusters.json --model "Llama 7B" --cluster 8xh100
"""

from __future__ import annotations

import argparse
import copy
import importlib
import json
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from bench.report import write_report
from cotrain_compile.cluster.answer.strategies import answer
from cotrain_compile.cluster.model.profiles import LayerProfile
from cotrain_compile.cluster.model.strategy import Question, RankedStrategy
from cotrain_compile.cluster.sources.cluster_presets import find_cluster
from cotrain_compile.cluster.sources.profile_files import with_layers
from cotrain_compile.cluster.sources.traced_profile import profile_on_cluster
from cotrain_compile.dataflow import Dataflow
from cotrain_compile.entry.tracing import trace
from cotrain_compile.files import load, save
from cotrain_compile.support.units import format_bytes, format_seconds

EXAMPLES = Path("docs/examples")
LAYERS, BATCH, LENGTH, SAMPLES = 4, 4, 2048, 256


@dataclass(frozen=True)
class Model:
    """A shape of `docs/examples`, in a file, and the function that makes a model of it."""

    name: str
    file: str
    shape: str
    made_by: str


MODELS = (
    Model("Llama 7B", "llama", "LLAMA_7B", "LlamaForCausalLM"),
    Model("Llama 13B", "llama", "LLAMA_13B", "LlamaForCausalLM"),
    Model("Llama 70B", "llama", "LLAMA_70B", "LlamaForCausalLM"),
    Model("Mixture 8 x 7B", "moe", "MOE_8X7B", "mixture"),
)
CLUSTERS = (
    "8xh100",
    "8xh100 machines=2",
    "8xh100 machines=8",
    "8xt4",
    "4xrtx3090",
    "4xa100-4xv100",
)


@dataclass(frozen=True)
class Row:
    """A model on a cluster: strategies as the answer ranks them, and what nobody knows; what the
    model takes of all memory at least, and in one sentence why nothing fits, where nothing does.

    `useful_s` are the device-seconds of computing that all samples take at least, each layer once;
    `solve_s` the processor's seconds for the answer, without the trace; one thread does it.
    """

    model: str
    cluster: str
    samples: int
    devices: int
    useful_s: float
    strategies: Sequence[Mapping[str, Any]]
    assumed: Sequence[str]
    solve_s: float
    memory: Mapping[str, Any]
    why_none: str


def _example(name: str) -> Any:
    """A module of the examples, which import one another by name."""
    folder = str(EXAMPLES.resolve())
    if folder not in sys.path:
        sys.path.insert(0, folder)
    return importlib.import_module(name)


def step_of(model: Model, folder: Path | None) -> Dataflow:
    """The traced step of a few layers, on a card, with a symbolic batch; kept in `folder`."""
    kept = folder / f"{model.shape.lower()}_{LAYERS}_layers.json" if folder else None
    if kept is not None and kept.exists():
        return load(kept, Dataflow)
    module = _example(model.file)
    config = copy.deepcopy(getattr(module, model.shape))
    config.num_hidden_layers = LAYERS
    build = _example("training").training_step
    step = trace(
        lambda: build(getattr(module, model.made_by)(config), batch=BATCH, length=LENGTH),
        dynamic=True,
        device="cuda",
    )
    if kept is not None:
        kept.parent.mkdir(parents=True, exist_ok=True)
        save(step, kept)
    return step


def profile_of(model: Model, cluster: str, folder: Path | None) -> LayerProfile:
    """All layers of `model`, on the devices of that cluster."""
    step = step_of(model, folder)
    (symbol,) = (name for name, size in step.symbols.items() if size == BATCH)
    sizes = [2**i for i in range(SAMPLES.bit_length())]
    shallow = profile_on_cluster(
        model.name,
        step,
        find_cluster(cluster),
        [symbol],
        samples=sizes,
        tokens_per_sample=LENGTH,
    )
    depth = getattr(_example(model.file), model.shape).num_hidden_layers
    return with_layers(shallow, depth)


def row(model: Model, cluster: str, folder: Path | None) -> Row:
    """The answer for `model` on `cluster`."""
    profile, machines = profile_of(model, cluster, folder), find_cluster(cluster)
    began = time.process_time()
    found = answer(profile, machines, SAMPLES)
    seconds = time.process_time() - began
    figures = found.figures()
    return Row(
        model.name,
        cluster,
        SAMPLES,
        len(machines.devices),
        Question(profile, machines, SAMPLES).least_device_s,
        figures["strategies"],
        found.assumed,
        seconds,
        figures["memory"],
        found.why_none,
    )


def table(result: Mapping[str, Any]) -> str:
    """For the page of results."""
    lines = [
        "| model, cluster | best | step | bound | tokens/s | useful | peak | others | solved in |",
        "|---" * 9 + "|",
    ]
    lines += [_line(each) for each in result["rows"]]
    told = (
        "`useful` is the part of the devices' time in which they compute what a step computes "
        "once, by the roofline: without layers that run again, exchanges and waiting. Behind the "
        "best are those that fit, by their step as a multiple of its step; in brackets what does "
        "not fit, with what is missing where it is known. Where nothing fits, it says whether "
        "anything could. Why each loses, its setting and its traffic are in the JSON. Seconds to "
        "solve are the processor's, of one thread."
    )
    return "\n".join([*lines, "", told, ""])


def _line(each: Mapping[str, Any]) -> str:
    best, *others = each["strategies"]
    place = f"{each['model']}, {each['cluster']}"
    solved = format_seconds(each["solve_s"])
    if best["step_s"] is None or best["fits"] is False:
        told = _why_none(each)
        return f"| {place} | none fits | - | - | - | - | - | {told} | {solved} |"
    useful = each["useful_s"] / each["devices"] / best["step_s"]
    told = "; ".join(filter(None, (_behind(one, best["step_s"]) for one in others)))
    cells = (
        place,
        f"{best['name']}: {_short(best['setting'])}",
        format_seconds(best["step_s"]),
        format_seconds(best["bound_s"]),
        f"{best['tokens_per_s']:,.0f}",
        f"{100 * useful:.0f} %",
        format_bytes(max(best["peak_bytes"])),
        told,
        solved,
    )
    return f"| {' | '.join(cells)} |"


def _why_none(each: Mapping[str, Any]) -> str:
    """That nothing can fit, or what each strategy is short of."""
    said: str = each.get("why_none", "").removesuffix(".")
    if said and each["memory"]["limit"]:
        return said
    missing = {one["reason"]: one["name"] for one in each["strategies"] if one["fits"] is False}
    behind = [f"{name}: {reason}" for reason, name in missing.items()] if said else []
    behind = behind or [_behind(one, None) for one in each["strategies"]]
    return "; ".join(filter(None, (said, *behind)))


def _short(setting: str) -> str:
    """With the number of stages in place of their names."""
    said, _, names = setting.partition("; stages begin at ")
    return f"{said}; {names.count(',') + 2} stages" if names else said


def _behind(one: Mapping[str, Any], best_s: float | None) -> str:
    """A strategy beside the best."""
    if one["fits"] is False:
        least = one["reason"].partition(" on the ")[0]
        return f"({one['name']}: {least})" if least.startswith("needs") else f"({one['name']})"
    if one["step_s"] is None or best_s is None:
        return ""
    return f"{one['name']} {one['step_s'] / best_s:.2f}"


def words(one: Mapping[str, Any]) -> str:
    """What the seconds of a strategy go to."""
    return RankedStrategy(one["name"], spent_s=one["spent_s"]).spent


def _place(each: Mapping[str, Any]) -> tuple[int, int]:
    names = [model.name for model in MODELS]
    return names.index(each["model"]), CLUSTERS.index(each["cluster"])


def main(arguments: Sequence[str] | None = None) -> None:
    """Add rows that are missing to the output, and print the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("-o", "--output", type=Path, required=True)
    parser.add_argument("--model", action="append", help="as the table has it")
    parser.add_argument("--cluster", action="append")
    parser.add_argument("--steps", type=Path, help="folder for traced steps")
    given = parser.parse_args(arguments)
    rows = json.loads(given.output.read_text())["result"]["rows"] if given.output.exists() else []
    known = {(each["model"], each["cluster"]) for each in rows}
    for model in MODELS:
        for cluster in given.cluster or CLUSTERS:
            wanted = model.name in (given.model or [model.name])
            if wanted and (model.name, cluster) not in known:
                rows.append(asdict(row(model, cluster, given.steps)))
                rows.sort(key=_place)
                write_report(given.output, (__doc__ or "").splitlines()[0], {"rows": rows})
    print(table({"rows": rows}))


if __name__ == "__main__":
    main()

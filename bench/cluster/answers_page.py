"""The page `docs/which_clusters.md`: the answers for six clusters, explained.

In: `bench/results/six_clusters.json`, whose sentences are the product's own: what the seconds of
the best go to, and what others spend more. Out: the page; a test holds it to the JSON.

    python -m bench.cluster.answers_page
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from bench.cluster.six_clusters import words
from cotrain_compile.support.units import format_bytes, format_seconds

ROOT = Path(__file__).parents[2]
SPENT = ("computing", "exchanges", "hosts", "other ranks")
RESULTS = ROOT / "bench" / "results" / "six_clusters.json"
PAGE = ROOT / "docs" / "which_clusters.md"

HEAD = """# Six clusters, and why

What `cotrain-compile cluster` answers for {models} on six clusters, 256 sequences of 2048 tokens a
step, mixed precision, AdamW, clipping. *Simulated*: nothing was run. Each answer says what the
seconds of the best strategy go to. Others take so many times as long; of which seconds they have
more and less is in the columns: computing, and waiting for exchanges, hosts and other ranks
([how](cluster.md#one-answer)).

What the six have in common:

- Where cards exchange faster than they compute, sharding alone is close to the best, and what is
  composed with it changes a few percent: layers are divided where micro-batches of one rank are
  too small, or would have to run again.
- Where the network is slow, what sends least wins: a pipeline sends one layer's output between
  neighbours, a shard all parameters to everybody.
- A pipeline pays with waiting for other ranks, the more stages and the fewer micro-batches there
  are, and runs its layers again.
- Cards of two kinds work together where the slower ones bring more than they cost; else the
  answer leaves them idle.
"""


def page(rows: Sequence[Mapping[str, Any]]) -> str:
    """The page as text."""
    models = list(dict.fromkeys(row["model"] for row in rows))
    clusters = list(dict.fromkeys(row["cluster"] for row in rows))
    parts = [HEAD.format(models=" and ".join(models))]
    for cluster in clusters:
        parts.append(f"## {cluster}\n")
        parts += ["\n".join(_answer(row)) for row in rows if row["cluster"] == cluster]
    return "\n".join(parts)


def _answer(row: Mapping[str, Any]) -> Iterator[str]:
    ready = [one for one in row["strategies"] if one["step_s"] is not None and one["fits"]]
    if not ready:
        yield f"**{row['model']}**: {row['why_none'] or 'nothing fits'}\n"
        return
    best, *others = ready
    useful = row["useful_s"] / row["devices"] / best["step_s"]
    yield (
        f"**{row['model']}: {best['name']}**, {format_seconds(best['step_s'])} a step, "
        f"{best['tokens_per_s']:,.0f} tokens a second, {best['devices']} of {row['devices']} "
        f"devices, {format_bytes(max(best['peak_bytes']))} on the fullest; {100 * useful:.0f} % of "
        f"all devices' time is computing that is needed. Why: {words(best)}. Setting: "
        f"{_short(best['setting'])}.\n"
    )
    yield "| not | times | computing | exchanges | hosts | other ranks |"
    yield "|---" + "|---:" * 5 + "|"
    yield from (_behind(one, best) for one in others)
    yield ""
    reasons: dict[str, list[str]] = {}
    for one in row["strategies"]:
        if one["fits"] is False:
            reasons.setdefault(one["reason"].partition(";")[0], []).append(one["name"])
    if reasons:
        told = "; ".join(f"{', '.join(names)}: {reason}" for reason, names in reasons.items())
        yield f"Does not fit: {told}.\n"


def _behind(one: Mapping[str, Any], best: Mapping[str, Any]) -> str:
    """How many times as long it takes, and where it spends more than the best, in seconds."""
    more = (one["spent_s"].get(what, 0.0) - best["spent_s"].get(what, 0.0) for what in SPENT)
    told = [f"{s:+.2f}" if abs(s) >= 0.005 and one["spent_s"] else "" for s in more]
    return " | ".join(
        (f"| {one['name']}", f"{one['step_s'] / best['step_s']:.2f}", *told, "")
    ).strip()


def _short(setting: str) -> str:
    """With the number of stages in place of their names."""
    said, _, names = setting.partition("; stages begin at ")
    return f"{said}; {names.count(',') + 2} stages" if names else said


def main() -> None:
    """Write the page."""
    PAGE.write_text(page(json.loads(RESULTS.read_text())["result"]["rows"]))


if __name__ == "__main__":
    main()

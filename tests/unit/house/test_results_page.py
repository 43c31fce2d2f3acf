"""What the documentation says was measured is what the committed JSONs say."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from bench.cluster import answers_page
from bench.results_page import compare, compiler_tables, figures, tables
from bench.results_page.compare import ELSEWHERE, PAGE, RESULTS, SECTIONS, page
from bench.results_page.figure import Figure
from bench.results_page.figures import FIGURES, refreshed

ROOT = Path(__file__).parents[3]
GO_ON = "run `make results`, or `python -m bench.results_page.compare --write`, and read the diff"


def test_the_results_page_is_made_from_the_results() -> None:
    assert PAGE.read_text(encoding="utf-8") == page(), GO_ON


@pytest.mark.parametrize("name", sorted({figure.page for figure in FIGURES}))
def test_the_sentences_of_a_page_quote_the_results(name: str) -> None:
    text = (ROOT / name).read_text(encoding="utf-8")
    assert text == refreshed(text, name), GO_ON


def test_every_result_has_a_section() -> None:
    patterns = [*(section.pattern for section in SECTIONS), *ELSEWHERE]
    shown = {path for pattern in patterns for path in RESULTS.glob(f"{pattern}.json")}
    assert sorted(RESULTS.glob("*.json")) == sorted(shown)


QUOTED = Figure("page.md", "a step takes {} ms and {} bytes", "step", lambda r: [r["ms"], r["nb"]])


@pytest.fixture
def one_figure(tmp_path: Path) -> Iterator[None]:
    (tmp_path / "step.json").write_text(json.dumps({"result": {"ms": "7.5", "nb": "1,024"}}))
    with (
        mock.patch.object(figures, "RESULTS", tmp_path),
        mock.patch.object(figures, "FIGURES", (QUOTED,)),
    ):
        yield


@pytest.mark.usefixtures("one_figure")
def test_only_the_numbers_of_a_sentence_change_not_its_line_breaks() -> None:
    text = "Here 12 tests: a step\ntakes 123.4 ms and 99 bytes. A step takes long.\n"
    found = refreshed(text, "page.md")
    assert found == "Here 12 tests: a step\ntakes 7.5 ms and 1,024 bytes. A step takes long.\n"
    assert refreshed(found, "page.md") == found


@pytest.mark.usefixtures("one_figure")
@pytest.mark.parametrize("count", [0, 2])
def test_a_sentence_that_cannot_be_told_from_others_is_refused(count: int) -> None:
    with pytest.raises(ValueError, match=f"{count} times, not once; when you change"):
        refreshed("a step takes 1 ms and 2 bytes\n" * count, "page.md")


def test_a_page_without_results_has_only_its_head(tmp_path: Path) -> None:
    with mock.patch.object(compare, "RESULTS", tmp_path):
        assert page() == compare.HEAD


def test_growth_tells_the_stage_that_grows_fastest() -> None:
    found = compiler_tables.growth(
        {
            "nodes": [100, 200, 400],
            "seconds": {"capture": {"exponent": 1.0}, "check": {"exponent": 1.3}},
            "compiler_bytes": {"exponent": 0.5},
        }
    )
    assert "From 100 to 400 nodes each of 2 stages" in found
    assert "at most 1.30 (check; 1 is linear), memory with 0.50" in found


def test_first_steps_are_beside_each_other() -> None:
    cold, warm = {"processor_s": 30.2}, {"processor_s": 9.8}
    ours = {"cold": cold, "warm": warm}
    one = {"ours": ours, "stock": {"cold": {"processor_s": 50.0}, "warm": warm}}
    found = compiler_tables.compile_seconds({"gpt2": one})
    assert "| gpt2 | 30 s | 10 s | 50 s | 10 s |" in found


def test_what_is_best_for_clusters_is_counted_over_all_and_shown_for_one_model() -> None:
    def plan(name: str, step_s: float | None, fits: bool) -> dict[str, Any]:
        return {"name": name, "step_s": step_s, "fits": fits, "tokens_per_s": 1e3}

    one = {"model": "7B", "cluster": "a", "devices": 2, "useful_s": 3.0}
    rows = [
        {**one, "strategies": [plan("shard", 2.0, True), plan("replicate", 3.0, True)]},
        {**one, "model": "13B", "strategies": [plan("shard", 2.0, True)]},
        {**one, "cluster": "b", "strategies": [plan("shard", None, False)]},
    ]
    found = tables.six_clusters({"rows": rows})
    assert "| a | shard | 1,000 | 75 % | 1.50 × |" in found
    assert "Of 3 models and clusters 2 fit; best is shard in 2." in found


def peers(ours: float, theirs: float) -> dict[str, Any]:
    seconds = {"ours": ours, "torch fused": theirs, "limit": ours / 2}
    return {
        "peers": {"deepspeed": "1.0"},
        "records": [
            {
                "parameters": 1_000_000,
                "gradient": "float32",
                "threads": 1,
                "seconds": {name: {"quiet_median": value} for name, value in seconds.items()},
                "ours_against": {"torch fused": theirs / ours, "limit": 0.5},
            }
        ],
    }


def test_a_peer_that_wins_is_told_with_its_factor() -> None:
    assert "torch fused 0.50 × to 0.50 ×" in tables.host_update_peers(peers(ours=2e-3, theirs=1e-3))


def simulated(
    plan: str, seconds: float, nbytes: int = 0, predicted_s: float = 1.0, spread: float = 0.0
) -> dict[str, Any]:
    least, most = seconds - spread, seconds + spread
    return {
        "model": "mlp",
        "link": "1 GB/s",
        "plan": plan,
        "predicted_s": predicted_s,
        "measured_s": {"median": seconds, "min": least, "max": most},
        "time_error": 0.0,
        "predicted_peak_bytes": nbytes,
        "measured_peak_bytes": nbytes,
    }


def of_simulated(*rows: dict[str, Any]) -> str:
    summary = {"time_error_median": 0.0, "time_error_worst": 0.0}
    return tables.simulated_vs_measured({"records": rows, "summary": summary})


def test_pairs_within_the_spread_of_measurements_are_told_from_the_others() -> None:
    text = of_simulated(
        simulated("resident", 1.0, predicted_s=1.1, spread=0.1),
        simulated("coarse", 1.1, predicted_s=1.0, spread=0.1),
        simulated("streamed", 2.0, predicted_s=2.0, spread=0.1),
        simulated("streamed", 3.0, predicted_s=3.0) | {"model": "larger"},
    )
    assert "times is 0.67; of plans for one model 0.33, and 1.00 of the 2 pairs of 3" in text


def test_a_rule_that_beats_auto_in_measurement_is_named() -> None:
    rows = [
        simulated("auto at 30%", 1.0, 100),
        simulated("coarse", 0.9, 100),
        simulated("fast", 0.5, 200),
    ]
    text = of_simulated(*rows)
    assert "Faster than `auto` in no more memory: coarse for mlp, where" in text


def test_rows_of_a_card_have_their_peers_beside_them() -> None:
    own = {"name": "resident", "predicted_s": 1.0, "measured_s": 1.5}
    peer = {"name": "eager", "measured_s": 2.0, "allocator_peak_bytes": 2**30, "remark": "plain"}
    found = tables.gpu_suite({"performance": [own], "peers": [peer]})
    assert "| resident | 1.000 s | 1.500 s | - |  |" in found
    assert "| eager | - | 2.000 s | 1.0 GiB | plain |" in found


def test_the_page_of_six_clusters_is_that_of_its_json() -> None:
    rows = json.loads(answers_page.RESULTS.read_text())["result"]["rows"]
    assert answers_page.PAGE.read_text() == answers_page.page(rows)
    assert len({row["cluster"] for row in rows}) == 6

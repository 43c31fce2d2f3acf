"""`cotrain-compile cluster`: a table that fits a terminal, JSON with all figures, clear errors."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from cotrain_compile import files
from cotrain_compile.cli.main import app
from cotrain_compile.cluster.model.layout import StagePlan
from cotrain_compile.cluster.model.profiles import per_sample
from cotrain_compile.cluster.model.strategy import Answer, RankedStrategy
from cotrain_compile.errors import FormatError, OptionError
from cotrain_compile.plan import Plan
from cotrain_compile.viz.report.cluster_page import PictureRow, cuts, widths
from tests.support.clusters import SMALL_HOST, a_box, a_model
from tests.unit.cluster.test_traced_profile import step


@pytest.fixture
def small(tmp_path: Path) -> list[str]:
    """A profile and a cluster, both of our own format."""
    profile, cluster = tmp_path / "profile.json", tmp_path / "cluster.json"
    files.save(a_model((10**7, 10**7), per_sample(30)), profile)
    files.save(a_box(2, 1e9), cluster)
    return ["cluster", str(profile), "--cluster", str(cluster), "--samples", "4"]


def test_the_table_names_every_strategy_and_fits_a_terminal(small: list[str]) -> None:
    result = CliRunner().invoke(app, small, env={"COLUMNS": "100"})
    assert result.exit_code == 0
    lines = result.output.splitlines()
    assert max(map(len, lines)) <= 100
    assert lines[0] == "small on box, 4 samples a step"
    assert lines[1].split() == [
        *("step", "at", "least", "peak", "devices", "traffic", "samples/s", "fits")
    ]
    best = lines[2].split()[0]
    assert any(line.startswith(f"{best}: the best, ") for line in lines)
    assert "within one machine keep NCCL" in " ".join(result.output.split())
    told = " ".join(result.output.split())
    for name in ("pipeline-gpipe", "pipeline-1f1b", "harmony-pp"):
        assert f'cotrain_compile.pipeline, with strategy="{name}"' in told


def test_json_has_what_the_table_says(small: list[str]) -> None:
    result = CliRunner().invoke(app, [*small, "--json", "--strategies", "shard,byteps"])
    assert result.exit_code == 0
    shard, byteps = json.loads(result.output)["strategies"]
    assert (shard["name"], shard["devices"], shard["fits"]) == ("shard", 2, True)
    assert shard["bound_s"] <= shard["step_s"] == pytest.approx(12, rel=0.1)
    assert len(shard["peak_bytes"]) == 2
    assert set(shard["traffic"]) == {"between devices of a machine"}
    assert byteps["step_s"] is None
    assert byteps["reason"] in byteps["loses"]


def test_the_page_draws_every_strategy_that_has_a_time(small: list[str], tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    told = CliRunner().invoke(app, [*small, "--page", str(page), "--json"])
    assert told.exit_code == 0
    text = page.read_text()
    for one in json.loads(told.output)["strategies"]:
        assert "timeline" not in one
        drawn = f'data-chart="{one["name"]}"' in text
        assert drawn == (one["step_s"] is not None)
        assert f"<b>{one['name']}</b>" in text
    assert 'class="cap"' in text


def test_why_nothing_fits_is_in_words_on_the_page_and_in_json(
    small: list[str], tmp_path: Path
) -> None:
    page, cluster = tmp_path / "page.html", tmp_path / "cluster.json"
    files.save(a_box(2, 1e9, 10**7, host=SMALL_HOST), cluster)
    told = CliRunner().invoke(app, [*small, "--page", str(page)])
    assert told.exit_code == 0
    why = json.loads(CliRunner().invoke(app, [*small, "--json"]).output)["why_none"]
    assert why.startswith("Nothing can fit: small takes 76.3 MiB at least")
    assert why in " ".join(told.output.split())
    assert why in page.read_text()


def test_cuts_and_widths_are_drawn_over_the_layers() -> None:
    layers = ("a", "b", "c", "d")
    plan = StagePlan("gpipe", ("b",), 2, 1)
    cut = RankedStrategy(
        "pipeline-gpipe", peak_bytes=(5, 9), stages=plan, capacities_bytes=(10, 12)
    )
    assert list(cuts(cut, layers)) == [
        PictureRow("stage 0", ((0, 25, "a"),), "5 B of 10 B", 50),
        PictureRow("stage 1", ((25, 75, "b to d"),), "9 B of 12 B", 75),
    ]
    wide = RankedStrategy("burst", widths={"a": 2, "b": 1, "c": 2, "d": 2})
    assert list(widths(wide, layers)) == [
        PictureRow("2 devices", ((0, 25, "a"), (50, 50, "c to d")), "3 layers"),
        PictureRow("1 device", ((25, 25, "b"),), "1 layer"),
    ]


def test_an_answer_is_saved_and_shown_as_it_was(small: list[str], tmp_path: Path) -> None:
    saved = str(tmp_path / "cluster-plan.json")
    wide = {"COLUMNS": "100"}
    told = CliRunner().invoke(app, [*small, "-o", saved], env=wide)
    assert told.exit_code == 0
    shown = CliRunner().invoke(app, ["show", saved], env=wide)
    assert shown.exit_code == 0
    assert told.output.splitlines()[: len(shown.output.splitlines())] == shown.output.splitlines()
    found = files.load(saved, Answer)
    assert found.best
    assert f"{found.best.name}: " in shown.output
    assert files.from_json(files.to_json(found), Answer) == found
    refused = CliRunner().invoke(app, ["show", saved, "--html", str(tmp_path / "page.html")])
    assert isinstance(refused.exception, OptionError)
    document = json.loads(Path(saved).read_text())
    for one in document["data"]["strategies"]:
        one["name"] = "shard" if one["name"] == "replicate" else one["name"]
    Path(saved).write_text(json.dumps(document))
    result = CliRunner().invoke(app, ["show", saved])
    assert isinstance(result.exception, FormatError)
    assert "each once" in str(result.exception)


def test_what_is_no_strategy_or_no_cluster_is_refused(small: list[str]) -> None:
    for wrong, told in (
        ([*small, "--strategies", "magic"], "strategies magic: known are"),
        ([*small, "--strategies", "replicat"], "did you mean 'replicate'?"),
        ([*small, "--strategies", ""], "strategies none: known are"),
        ([*small, "--cluster", "moon"], "no cluster named 'moon'"),
        ([*small, "--cluster", "8xh10"], "did you mean '8xh100'?"),
        ([*small, "--page", "no/such/folder.html"], "--page no/such/folder.html cannot be written"),
    ):
        result = CliRunner().invoke(app, wrong)
        assert isinstance(result.exception, OptionError)
        assert told in str(result.exception)


def test_a_traced_step_is_taken_as_on_the_first_device(small: list[str], tmp_path: Path) -> None:
    files.save(step(), tmp_path / "step.json")
    given = ["cluster", str(tmp_path / "step.json"), *small[2:], "--strategies", "replicate"]
    given += ["--json", "--tokens-per-sample", "8"]
    result = CliRunner().invoke(app, [*given, "--batch-symbols", "s0"])
    assert result.exit_code == 0
    (replicate,) = told = json.loads(result.output)["strategies"]
    assert replicate["tokens_per_s"] == pytest.approx(8 * replicate["samples_per_s"])
    without = json.loads(CliRunner().invoke(app, given).output)
    assert without["strategies"] == told  # it has that symbol alone
    assert "The samples are counted by s0." in without["assumed"]
    wrong = CliRunner().invoke(app, [*given, "--batch-symbols", "q"])
    assert "q given for the samples" in str(wrong.exception)


def test_a_rank_of_a_traced_step_is_planned_tensor_by_tensor(
    small: list[str], tmp_path: Path
) -> None:
    traced, plan = tmp_path / "step.json", tmp_path / "plan.json"
    files.save(step(), traced)
    # Of one sample one op touches 324 bytes at once; all that is alive there is more.
    cluster = tmp_path / "tight.json"
    files.save(a_box(2, 1e9, 400), cluster)
    given = ["cluster", str(traced), "--cluster", str(cluster), "--samples", "4"]
    given += ["--strategies", "replicate", "--rank-plan", str(plan)]
    result = CliRunner().invoke(app, [*given, "--json"])
    assert result.exit_code == 0
    told = json.loads(result.output)["rank_plan"]
    assert told["peak_bytes"] <= 400
    assert told["host_bytes"] > 0
    assert told["bound_s"] <= told["step_s"]
    shown = CliRunner().invoke(app, given)
    assert told["micro_batches"] == told["samples"] > 1
    ranks = f"one of {told['devices']} ranks of replicate with {told['samples']} micro-batches of 1"
    assert ranks in shown.output
    assert files.load(plan, Plan).fingerprint.endswith(step().fingerprint)
    plan.unlink()
    files.save(a_box(2, 1e9, 100), cluster)
    none = CliRunner().invoke(app, given)
    assert none.exit_code == 0
    assert "no plan tensor by tensor, so none is saved" in " ".join(none.output.split())
    assert not plan.exists()
    refused = CliRunner().invoke(app, [*small, "--rank-plan", str(plan)])
    assert "plans a traced step" in str(refused.exception)


def test_a_deep_model_is_ranked_from_four_of_its_layers(small: list[str], tmp_path: Path) -> None:
    files.save(a_model((10**7,) * 4, per_sample(30)), tmp_path / "profile.json")
    asked = [*small, "--json", "--strategies", "replicate"]
    times = {}
    for depth in (4, 8):
        told = CliRunner().invoke(app, [*asked, "--layers", str(depth)])
        assert told.exit_code == 0, told.output
        times[depth] = json.loads(told.output)["strategies"][0]["step_s"]
    assert times[8] == pytest.approx(2 * times[4], rel=0.01)
    with pytest.raises(OptionError, match="leave out --layers"):
        CliRunner().invoke(
            app, [*asked, "--layers", "4", "--rank-plan", "plan.json"], catch_exceptions=False
        )

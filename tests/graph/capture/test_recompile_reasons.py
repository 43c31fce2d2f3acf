"""Which value of the user's a reason to compile again is about, in the words of several torches."""

from __future__ import annotations

from pathlib import Path

import pytest
from torch._dynamo import convert_frame

from cotrain_compile.capture.dynamo.recompiles import in_torchs_words, what_changes
from cotrain_compile.errors import CaptureError
from tests.graph.capture.test_scripts import APPENDING, HEAD, run
from tests.support.steps import cotrain

PLACE = "  # losses.append(loss)  # train.py:14 in step"
STACK = '\nUser stack trace:\n  File "train.py", line 14, in step\n    losses.append(loss)'


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        pytest.param("losses", "0/{0}: len(G['losses']) == {0}    " + PLACE, id="2.13"),
        pytest.param("losses", "0/{0}: len(losses) == {0}" + PLACE, id="without a scope"),
        pytest.param("losses", "[0/{0}]: len(L['losses']) == {0}" + PLACE, id="other numbering"),
        pytest.param("losses", "len(L['losses']) == {0}" + PLACE, id="no numbering"),
        pytest.param("self.n", "1/{0}_1: L['self'].n == {0}" + PLACE, id="attribute"),
        pytest.param("self.n", "0/{0}: self.n == {0}" + PLACE + " (HINT: a closure)", id="2.14"),
        pytest.param("d['a'].x", "0/{0}: not G['d']['a'].x" + PLACE, id="item"),
        pytest.param("x", "0/{0}: ___check_obj_id(L['x'], 14{0})" + PLACE, id="identity"),
        pytest.param("n", "0/{0}: L['n'] == {0}" + STACK, id="with a stack"),
    ],
)
def test_the_value_is_named_as_the_user_writes_it(value: str, reason: str) -> None:
    told = what_changes(reason.format(i) for i in range(5))
    assert told is not None
    assert told.startswith(f"`{value}` changes from call to call")
    assert "`losses.append(loss)`" in told
    assert what_changes([reason.format(i) for i in range(3)]) is None  # as many as a mode has


def test_places_of_a_table_are_one_value() -> None:
    guard = "0/{0}: G['o'].param_groups[0]['buffer'][{0}][0] is None  # if t == row[0]:  # o.py:9"
    told = what_changes(guard.format(i) for i in range(5))
    assert told is not None
    assert told.startswith("`o.param_groups[0]['buffer'][...][0]` of the optimizer changes")
    assert "`if t == row[0]:`" in told
    assert "take the optimizer of that name from torch.optim" in told


def test_a_loop_whose_rounds_change_is_not_told_to_pass_them_in() -> None:
    told = what_changes(f"0/{i}: G['n'] == {i}  # for _ in range(n):  # t.py:3" for i in range(5))
    assert told is not None
    assert "`n` changes" in told
    assert "each number of them is a graph" in told
    assert "number that is an argument" not in told


@pytest.mark.parametrize(
    "reason",
    [
        "0/3: tensor 'x' size mismatch at index 0. expected 4, actual 5",
        "0/3: Duplicate tensors found: a, b",
        "0/3: 3 < 4 < 5",
        "0/3: L['model'].weight.grad is None",
        "something new in another torch",
    ],
)
def test_what_names_no_value_is_left_in_torchs_words(reason: str) -> None:
    assert what_changes([reason] * 8) is None
    assert in_torchs_words([reason] * 8) == reason.removeprefix("0/3: ")


def test_a_step_that_no_graph_fits_is_refused_in_torchs_words_where_no_value_is_known(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = tmp_path / "train.py"
    script.write_text(HEAD + APPENDING.replace("for x, y in batches:", "for x, y in batches[:1]:"))
    left = run(script, cotrain())
    monkeypatch.setattr(
        convert_frame, "get_and_maybe_log_recompilation_reasons", lambda *_, **__: ["0/0: it is so"]
    )
    monkeypatch.setattr(
        convert_frame, "exceeds_recompile_limit", lambda *_: (True, "recompile_limit")
    )
    with pytest.raises(CaptureError, match=r"train\.py.*too often; torch says.*`it is so`"):
        left["step"](*left["batches"][0])

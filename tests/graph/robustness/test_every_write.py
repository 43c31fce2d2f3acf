"""Each write of a step fails in turn: before it, in the middle of it, and after it.

Few writes in every run, all of them in a long one.
"""

from __future__ import annotations

import pytest

from tests.support.faults import MORE_SETTINGS, SETTINGS, compiled_setting, trial_of
from tests.support.faults_of_writes import WHEN, check_told, fail_write, write_sites

pytestmark = pytest.mark.usefixtures("watchdog", "one_thread")

NAMES = [*SETTINGS, *MORE_SETTINGS]
EVERY = [
    *(pytest.param(name, 3, id=name) for name in NAMES),
    *(pytest.param(name, None, id=f"{name}-all", marks=pytest.mark.long) for name in NAMES),
]


def fail_at_write(name: str, number: int, when: str) -> None:
    trial, compiled = trial_of(name)
    error = fail_write(trial, compiled, write_sites(compiled)[number], when)
    check_told(trial, compiled, name, error)


@pytest.mark.parametrize(("name", "most"), EVERY)
def test_a_write_that_fails_is_told_and_costs_no_later_step(name: str, most: int | None) -> None:
    count = len(write_sites(compiled_setting(name)))
    assert count
    for number in range(0, count, max(1, count // most) if most else 1):
        for when in WHEN:
            fail_at_write(name, number, when)


def test_statistics_and_kept_gradients_are_among_the_writes() -> None:
    def written(name: str) -> set[str]:
        return {n for site in write_sites(compiled_setting(name)) for n in site.names}

    assert any("running_mean" in name for name in written("statistics"))
    roles = {i.name: i.role.value for i in trial_of("kept gradients")[0].step.step.inputs}
    assert "gradient" in {roles[name] for name in written("kept gradients")}

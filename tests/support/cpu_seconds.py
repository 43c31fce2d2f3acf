"""CPU seconds of tests and of the processes that they wait for: a plugin of pytest.

    .venv/bin/python -m pytest -p tests.support.cpu_seconds tests/graph/capture

On a busy computer a clock, and with it `--durations`, tells of its other work. In: a run, with
workers or without. Out: the dearest files and tests at its end.
"""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Generator

import pytest

MOST = 40
STARTED = pytest.StashKey[float]()
PROPERTY = "cpu_s"


class Spent:
    """Gathers what the reports of tests say, from workers too."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when == "teardown":
            (self.seconds[report.nodeid],) = (
                float(str(value)) for name, value in report.user_properties if name == PROPERTY
            )

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        files: dict[str, float] = defaultdict(float)
        for test, seconds in self.seconds.items():
            files[test.partition("::")[0]] += seconds
        terminalreporter.section(f"{sum(files.values()):.0f} CPU seconds")
        for table in (files, self.seconds):
            for name, seconds in sorted(table.items(), key=lambda item: -item[1])[:MOST]:
                terminalreporter.write_line(f"{seconds:8.2f} s  {name}")
            terminalreporter.write_line("")


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(Spent())


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    item.stash[STARTED] = _cpu_s()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    if call.when == "teardown":
        report.user_properties.append((PROPERTY, _cpu_s() - item.stash[STARTED]))
    return report


def _cpu_s() -> float:
    """Of this process and of its children that have ended."""
    times = os.times()
    return times.user + times.system + times.children_user + times.children_system

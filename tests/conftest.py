"""Checks after each integration test that it leaves nothing behind, and fails the run in CI when a
test skips for an unexpected reason."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support import builds, ledger, schedule, session

TESTS = Path(__file__).parent
# tests/kube counts a cluster around its whole life
INTEGRATION = ("kernel", "system", "cri")
# Reasons that may skip a test in CI; everything else that skips there fails the run.
EXPECTED_SKIPS: tuple[str, ...] = ()


def pytest_configure(config: pytest.Config) -> None:
    session.begin(schedule.worker(config))  # workers of xdist count apart from each other
    # In the background of a shell without jobs SIGINT is ignored, also in what tests start and
    # interrupt.
    signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if schedule.worker(config):
        items[:] = schedule.in_order(items, [item.nodeid for item in items])


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: object) -> object:
    return schedule.scheduler(config, log)


def pytest_collection_finish(session: pytest.Session) -> None:
    """Make long builds before the first test, outside of its time limit."""
    # The guest cannot build anything.
    if not session.config.option.collectonly and "PYRUNC_GUEST" not in os.environ:
        builds.make_for({item.path for item in session.items}, lambda line: print(line, flush=True))


@pytest.fixture(autouse=True, scope="session")
def folders_of_the_session(
    pytestconfig: pytest.Config, tmp_path_factory: pytest.TempPathFactory
) -> None:
    base = tmp_path_factory.getbasetemp()
    ledger.FOLDERS.add(f"{base}/")
    if schedule.worker(pytestconfig):
        ledger.OTHER_FOLDERS.add(f"{base.parent}/")  # each worker has its folder in it


@pytest.fixture(autouse=True)
def nothing_left_behind(request: pytest.FixtureRequest) -> Iterator[None]:
    """Fail an integration test that leaks descriptors, children, mounts, network devices, cgroups
    or processes."""
    part = request.path.relative_to(TESTS).parts[0]
    if part not in INTEGRATION:
        yield
        return
    anywhere = schedule.unit_of(request.node.nodeid) != schedule.MACHINE
    with ledger.nothing_left(
        "the test", of_machine=not (anywhere and schedule.worker(request.config))
    ):
        yield


class _Skips:
    def __init__(self) -> None:
        self.unexpected: list[str] = []

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if not report.skipped or hasattr(report, "wasxfail"):
            return
        reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
        if not any(expected in reason for expected in EXPECTED_SKIPS):
            self.unexpected.append(f"{report.nodeid}: {reason}")


def pytest_sessionstart(session: pytest.Session) -> None:
    if os.environ.get("CI"):
        session.config.pluginmanager.register(_Skips(), "unexpected-skips")


def pytest_sessionfinish(session: pytest.Session) -> None:
    skips = session.config.pluginmanager.get_plugin("unexpected-skips")
    if skips is not None and skips.unexpected:
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_terminal_summary(
    terminalreporter: pytest.TerminalReporter, config: pytest.Config
) -> None:
    skips = config.pluginmanager.get_plugin("unexpected-skips")
    if skips is not None and skips.unexpected:
        terminalreporter.section("skips that were not expected: the run fails")
        for line in skips.unexpected:
            terminalreporter.line(line)

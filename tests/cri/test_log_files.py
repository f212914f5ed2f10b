"""Tests log files of containers: the lines have CRI's format, and a log stays when its container is
removed."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.cri.server_harness import Server

LINE = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{9}(Z|[+-]\d\d:\d\d) (stdout|stderr) [FP] .*")


@pytest.mark.requirement("4.4.1", "11.1")
def test_output_goes_to_the_log_in_cri_form(server: Server) -> None:
    pod = server.run_pod()
    container = server.launch(
        pod,
        server.container_config(["sh", "-c", "echo to stdout; echo to stderr >&2; printf tail"]),
    )
    status = server.wait_exit(container)
    assert (status.exit_code, status.reason) == (0, "Completed")
    lines = Path(status.log_path).read_text().splitlines()
    assert all(LINE.fullmatch(line) for line in lines), lines
    assert sorted(line.split(" ", 1)[1] for line in lines) == [
        "stderr F to stderr",
        "stdout F to stdout",
        "stdout P tail",
    ]
    server.remove_container(container)
    assert Path(status.log_path).exists()

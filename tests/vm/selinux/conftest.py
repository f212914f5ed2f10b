"""Makes the guest's kernel enforce SELinux while these tests run, and puts the server into the
domain of Debian's policy for container engines.

Only that domain is permissive, because the policy expects a disk with labels and an engine that it
knows. The kernel enforces the policy on all that containers do, and on all that other processes do
to them.
"""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cri.server_harness import Server

ENGINE = "container_engine_t"
MODULE = "pyrunc_tests"
RULES = f"(typepermissive {ENGINE})\n(allow kernel_t {ENGINE} (process (transition)))\n"
ENFORCE = Path("/sys/fs/selinux/enforce")


@pytest.fixture(scope="session", autouse=True)
def enforcing(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    source = tmp_path_factory.mktemp("policy") / f"{MODULE}.cil"
    source.write_text(RULES)
    subprocess.run(["semodule", "-i", str(source)], check=True)
    try:
        ENFORCE.write_text("1")
        yield
    finally:
        ENFORCE.write_text("0")
        subprocess.run(["semodule", "-r", MODULE], check=True)


@pytest.fixture(scope="session")
def server(enforcing: None) -> Iterator[Server]:
    with Server(network=False, prefix=("runcon", "-t", ENGINE)) as selinux_server:
        selinux_server.load_image()
        yield selinux_server

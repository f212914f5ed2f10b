"""Tests the common part of all CNI plugins: versions, errors, exit codes."""

from __future__ import annotations

import json
from typing import Any

import pytest

from cni_plugins.protocol.call import CniCall
from cni_plugins.protocol.config import PluginConfig
from cni_plugins.protocol.errors import CniError
from cni_plugins.protocol.result import AssignedAddress, Result, parse_interface
from cni_plugins.skel import CniPlugin, answer
from pyrunc.errors import InvalidArgument, KernelError

ENVIRONMENT = {
    "CNI_CONTAINERID": "abc",
    "CNI_NETNS": "/proc/1/fd/9",
    "CNI_IFNAME": "eth0",
    "CNI_PATH": "/opt/cni/bin",
}


class Recorder:
    """A CNI plugin that records its commands; ADD raises `failure`."""

    def __init__(self, failure: Exception | None = None) -> None:
        self.calls: list[str] = []
        self.failure = failure
        self.plugin = CniPlugin(
            "test", self.add, *(self.verb(n) for n in ("DEL", "CHECK", "STATUS", "GC"))
        )

    def add(self, call: CniCall, config: PluginConfig) -> Result:
        self.calls.append("ADD")
        if self.failure:
            raise self.failure
        return Result(ips=(AssignedAddress(parse_interface("10.0.0.2/8")),))

    def verb(self, name: str) -> Any:
        def run(call: CniCall, config: PluginConfig) -> None:
            self.calls.append(name)

        return run


def ask(
    plugin: CniPlugin, command: str, cni_version: str = "1.1.0", content: bytes | None = None
) -> tuple[int, Any]:
    config = {"cniVersion": cni_version, "name": "net", "type": "test"}
    code, output = answer(
        plugin, {**ENVIRONMENT, "CNI_COMMAND": command}, content or json.dumps(config).encode()
    )
    return code, json.loads(output) if output else None


def test_add_prints_a_result_of_the_configurations_version() -> None:
    for cni_version, extra in (("0.3.1", {"version": "4"}), ("1.0.0", {}), ("1.1.0", {})):
        code, value = ask(Recorder().plugin, "ADD", cni_version)
        assert (code, value["cniVersion"], value["ips"]) == (
            0,
            cni_version,
            [{**extra, "address": "10.0.0.2/8"}],
        )


@pytest.mark.parametrize(
    ("command", "cni_version", "runs"),
    [
        ("DEL", "0.3.1", True),
        ("CHECK", "0.3.1", False),
        ("CHECK", "0.4.0", True),
        ("STATUS", "1.0.0", False),
        ("STATUS", "1.1.0", True),
        ("GC", "1.0.0", False),
        ("GC", "1.1.0", True),
    ],
)
def test_commands_run_from_their_first_version_on(
    command: str, cni_version: str, runs: bool
) -> None:
    recorder = Recorder()
    code, value = ask(recorder.plugin, command, cni_version)
    assert recorder.calls == ([command] if runs else [])
    assert (code, value) == (0, None) if runs else (code, value["code"]) == (1, 1)


def test_version_needs_no_configuration() -> None:
    code, output = answer(Recorder().plugin, {"CNI_COMMAND": "VERSION"}, b"")
    assert code == 0
    assert json.loads(output) == {
        "cniVersion": "1.1.0",
        "supportedVersions": ["0.1.0", "0.2.0", "0.3.0", "0.3.1", "0.4.0", "1.0.0", "1.1.0"],
    }


def test_the_error_for_an_unknown_version_has_a_known_version() -> None:
    code, value = ask(Recorder().plugin, "ADD", "7.0.0")
    assert (code, value["code"], value["cniVersion"]) == (1, 1, "1.1.0")
    assert "0.4.0" in value["details"]


@pytest.mark.parametrize(
    ("failure", "code"),
    [
        (CniError(11, "later"), 11),
        (InvalidArgument("wrong"), 7),
        (KernelError("mount", "x", 1), 5),
        (OSError(28, "full"), 5),
        (ZeroDivisionError("a bug"), 999),
    ],
)
def test_every_failure_is_an_error_object(
    failure: Exception, code: int, capfd: pytest.CaptureFixture[str]
) -> None:
    status, value = ask(Recorder(failure).plugin, "ADD")
    assert (status, value["code"]) == (1, code)
    assert value["msg"].startswith("test: ")
    assert ("Traceback" in capfd.readouterr().err) == (code == 999)


@pytest.mark.parametrize(
    "content", [b"{", b"[]", b'{"name": "x"}', b'{"type": "t", "cniVersion": "1.0.0"}', b" "]
)
def test_a_configuration_that_cannot_be_read_is_an_error_object(content: bytes) -> None:
    recorder = Recorder()
    code, value = ask(recorder.plugin, "ADD", content=content)
    assert code == 1 and value["code"] in (6, 7) and recorder.calls == []

"""Tests that device rules decide which devices can be opened."""

from __future__ import annotations

from typing import Any

import pytest

from tests.system.harness import Runtime

Config = dict[str, Any]


@pytest.mark.parametrize(("access", "works"), [("rwm", True), ("r", False), ("rw", True)])
def test_device_rules_allow_and_deny_access(runtime: Runtime, access: str, works: bool) -> None:
    def change(config: Config) -> None:
        config["linux"]["devices"] = [
            {"path": "/dev/fuse", "type": "c", "major": 10, "minor": 229, "fileMode": 0o666}
        ]
        config["linux"]["resources"]["devices"] = [
            {"allow": False, "access": "rwm"},
            {"allow": True, "type": "c", "major": 10, "minor": 229, "access": access},
        ]

    result = runtime.run("sh", "-c", "exec 3<>/dev/fuse && echo open", change=change)
    assert ("open" in result.out) == works, result


def test_devices_without_a_rule_are_denied(runtime: Runtime) -> None:
    def change(config: Config) -> None:
        config["linux"]["devices"] = [{"path": "/dev/fuse", "type": "c", "major": 10, "minor": 229}]

    result = runtime.run("sh", "-c", "exec 3</dev/fuse && echo open", change=change)
    assert "open" not in result.out and "not permitted" in result.err


def test_without_device_rules_the_hosts_devices_are_closed(runtime: Runtime) -> None:
    def change(config: Config) -> None:
        config["linux"]["resources"] = {}
        config["linux"]["devices"] = [{"path": "/dev/fuse", "type": "c", "major": 10, "minor": 229}]

    result = runtime.run("sh", "-c", "exec 3</dev/fuse && echo open", change=change)
    assert "open" not in result.out and "not permitted" in result.err

"""Tests the configuration file: defaults, flags that override keys, and errors that name the
key."""

from __future__ import annotations

from pathlib import Path

import pytest

from cri_server.cli.server.serve import FLAGS
from cri_server.config import Config, load
from cri_server.node.host import limits
from pyrunc.errors import InvalidSpec


def write(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "config.toml"
    path.write_text(text)
    return path


def test_flags_override_files_and_files_override_defaults(tmp_path: Path) -> None:
    path = write(
        tmp_path,
        '[server]\nroot = "/r"\nlog_level = "debug"\n[cgroup]\nmissing_controllers = "warn"\n',
    )
    config = load(path, {"server.root": "/flag", "server.state": None, "cgroup.driver": "cgroupfs"})
    assert (config.server.root, config.server.state) == ("/flag", "/run/pyrunc-cri")
    assert (config.cgroup.driver, config.cgroup.missing_controllers) == ("cgroupfs", "warn")
    assert config.server.log_level == "debug" and str(config.socket_path) == "/run/pyrunc/cri.sock"


def test_every_flag_has_a_key() -> None:
    config = Config()
    for key in FLAGS.values():
        table, _, name = key.partition(".")
        assert hasattr(getattr(config, table), name), key


@pytest.mark.parametrize(
    ("text", "where", "what"),
    [
        (
            "[cgroup]\ndriver = 'lxc'",
            "cgroup.driver",
            "'lxc' is not one of auto, cgroupfs, systemd",
        ),
        ("[cgroup]\ndirver = 'systemd'", "cgroup.dirver", "no such key"),
        ("[nope]\nx = 1", "nope", "no such table"),
        (
            "[network]\nbuiltin = ['10.0.0.0/8', '10.0.0.1/8']",
            "network.builtin[1]",
            "has host bits set",
        ),
        ("[images]\npinned = ['UPPER']", "images.pinned[0]", "UPPER"),
        (
            "[registry]\nconfig_path = '/a:b'",
            "config.toml:2: registry.config_path",
            "'b' is not an absolute path",
        ),
        ("[streaming]\nport = 70000", "streaming.port", "<= 65535"),
        ("[streaming]\nport = '1'", "streaming.port", "expected `int`"),
        ("server = 3", "server", "expected `object`"),
        ("[server]\nlisten = 'tcp://x'", "server.listen", "is not unix:///PATH"),
        ("[server]\nroot = 'relative'", "server.root", "absolute"),
        (f"[server]\nlisten = 'unix:///{'x' * 120}'", "server.listen", "longer than"),
        ("[server", "config.toml", "not TOML"),
    ],
)
def test_errors_name_the_key(tmp_path: Path, text: str, where: str, what: str) -> None:
    with pytest.raises(InvalidSpec) as caught:
        load(write(tmp_path, text), {})
    assert where in caught.value.path and what in caught.value.detail, str(caught.value)


def test_a_named_configuration_file_must_exist(tmp_path: Path) -> None:
    with pytest.raises(InvalidSpec, match="no such file"):
        load(tmp_path / "absent.toml", {})


@pytest.mark.parametrize(
    ("text", "what"),
    [
        ("nofile", "is not NAME=SOFT[:HARD]"),
        ("files=3", "is not NAME=SOFT[:HARD]"),
        ("nofile=1:2:3", "is not NAME=SOFT[:HARD]"),
        ("nofile=-1", "is not NAME=SOFT[:HARD]"),
        ("nofile=\u0663", "is not NAME=SOFT[:HARD]"),
        ("nofile=5:4", "the soft limit is above the hard one"),
        ("nofile=unlimited:4", "the soft limit is above the hard one"),
        ("nofile=unlimited", "the highest that this server may set"),
    ],
)
def test_invalid_limits_are_refused(text: str, what: str) -> None:
    with pytest.raises(InvalidSpec) as caught:
        limits(["core=0", text])
    assert caught.value.path == "containers.rlimits[1]" and what in caught.value.detail
    assert repr(text) in caught.value.detail


def test_limits_replace_defaults_by_name() -> None:
    values = limits(["nofile=10:20", "RLIMIT_STACK=4096"])
    assert values["RLIMIT_NOFILE"] == (10, 20) and values["RLIMIT_STACK"] == (4096, 4096)
    assert values["RLIMIT_MSGQUEUE"] == limits([])["RLIMIT_MSGQUEUE"]


def test_a_repeated_flag_is_a_list(tmp_path: Path) -> None:
    path = write(tmp_path, '[containers]\nrlimits = ["core=0"]\n')
    assert load(path, {"containers.rlimits": None}).containers.rlimits == ["core=0"]
    assert load(path, {"containers.rlimits": ["nofile=5"]}).containers.rlimits == ["nofile=5"]

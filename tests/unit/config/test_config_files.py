"""Tests drop-in files, origins of values, unknown keys, and the changes that a running server
applies."""

from __future__ import annotations

from pathlib import Path

import pytest
from click.testing import CliRunner

from cri_server.cli.server.configuration import config as command
from cri_server.config import Config, load, load_with_origins
from cri_server.config.changes import after_reload, changes
from cri_server.config.loader import problems
from cri_server.config.sources import ConfigSource, lines, read
from pyrunc.errors import InvalidSpec

MAIN = """\
[server]
log_level = "debug"
root = "/main"

[containers]
rlimits = [
  "core=0",
  "stack=1",
]
volatile = false
"""


def write(folder: Path, **drop_ins: str) -> Path:
    path = folder / "config.toml"
    path.write_text(MAIN)
    (folder / "config.toml.d").mkdir()
    for name, text in drop_ins.items():
        (folder / "config.toml.d" / f"{name}.toml").write_text(text)
    return path


def test_drop_ins_win_key_by_key_in_the_order_of_their_names(tmp_path: Path) -> None:
    path = write(
        tmp_path,
        b='[server]\nroot = "/b"\n',
        a='[server]\nroot = "/a"\nlog_format = "json"\n[containers]\nrlimits = ["nofile=5"]\n',
    )
    (tmp_path / "config.toml.d" / ".c.toml.swp").write_text("no [ TOML")
    (tmp_path / "config.toml.d" / ".hidden.toml").write_text("no [ TOML")
    settings = load(path, {})
    assert (settings.server.root, settings.server.log_format, settings.server.log_level) == (
        "/b",
        "json",
        "debug",
    )
    assert settings.containers.rlimits == ["nofile=5"] and settings.containers.volatile is False


def test_each_value_has_its_line(tmp_path: Path) -> None:
    path = write(tmp_path, a='\n[server]\nroot = "/a"\n')
    loaded = load_with_origins(path, {"server.state": "/s"})
    assert loaded.origin(("server", "root")) == f"{tmp_path}/config.toml.d/a.toml:3"
    assert loaded.origin(("server", "log_level")) == f"{path}:2"
    assert loaded.origin(("containers", "rlimits")) == f"{path}:6"
    assert loaded.origin(("containers", "volatile")) == f"{path}:10"
    assert loaded.origin(("server", "state")) == "command line"
    assert loaded.origin(("server", "listen")) == "default"


def test_errors_name_the_line_in_all_forms_of_toml() -> None:
    text = (
        '# c\na.b = 1\n[t."x.y"]\nk = """\n[no]\nz = 1\n"""\nl = { m = 1, n = [\n 2 ] }\n[[u]]\nv'
        " = 1\n"
    )
    assert lines(text) == {
        ("a", "b"): 2,
        ("t", "x.y"): 3,
        ("t", "x.y", "k"): 4,
        ("t", "x.y", "l", "m"): 8,
        ("t", "x.y", "l", "n"): 8,
        ("u",): 10,
        ("u", "v"): 11,
    }


def test_drop_ins_count_without_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write(tmp_path, a='[server]\nroot = "/a"\n')
    path.unlink()
    monkeypatch.setattr("cri_server.config.loader.DEFAULT_PATH", path)
    assert load(None, {}).server.root == "/a"
    with pytest.raises(InvalidSpec, match="no such file"):
        load(path, {})


def test_a_wrong_drop_in_is_named_with_its_line(tmp_path: Path) -> None:
    path = write(tmp_path, a='[server]\n\nrot = "/a"\n')
    with pytest.raises(InvalidSpec) as caught:
        load(path, {})
    assert (
        str(caught.value)
        == f"{tmp_path}/config.toml.d/a.toml:3: server.rot: no such key; did you mean root?"
    )


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (
            "[server]\nlog_levle = 'x'",
            ["x:2: server.log_levle: no such key; did you mean log_level?"],
        ),
        ("[servre]\nroot = '/x'", ["x:1: servre: no such table; did you mean server?"]),
        (
            "[server]\nrlimits = []",
            ["x:2: server.rlimits: no such key; it belongs to [containers]"],
        ),
        ("volatile = true", ["x:1: volatile: no such table; it belongs to [containers]"]),
        (
            "[images]\nzzz = 1\nqqq = 2",
            [
                "x:2: images.zzz: no such key; expected one of keep_blobs, pinned, store",
                "x:3: images.qqq: no such key; expected one of keep_blobs, pinned, store",
            ],
        ),
        ("[streaming]\nhost = 'h'\nport = 'x'", ["x:3: streaming.port: expected `int`, got `str`"]),
        (
            "[containers]\nrlimits = [\n'a',\n3]",
            ["x:2: containers.rlimits[1]: expected `str`, got `int`"],
        ),
    ],
)
def test_problems_have_suggestions(tmp_path: Path, text: str, expected: list[str]) -> None:
    path = tmp_path / "x"
    path.write_text(text)
    [source] = read(path, required=True)
    assert [str(error).replace(f"{tmp_path}/", "") for _, error in problems(source)] == expected


def test_changes_that_a_running_server_applies() -> None:
    before = Config()
    after = load_from(
        {"server.log_level": "debug", "server.root": "/other", "registry.config_path": "/x"}
    )
    assert [(c.key, c.reloads) for c in changes(before, after)] == [
        ("server.root", False), ("server.log_level", True), ("registry.config_path", True),
    ]  # fmt: skip
    applied = after_reload(before, after)
    assert (applied.server.log_level, applied.server.root) == ("debug", before.server.root)
    assert applied.registry.config_path == "/x"


def load_from(values: dict[str, str]) -> Config:
    return load_with_origins(Path("/dev/null"), values).config


def test_dump_shows_values_and_their_origins(tmp_path: Path) -> None:
    path = write(tmp_path, a='[server]\nroot = "/a"\n')
    result = CliRunner().invoke(
        command, ["dump", "--config", str(path), "--origin", "--state", "/s"]
    )
    lines = {line.split(" = ")[0]: line for line in result.output.splitlines()}
    assert lines["root"].split() == ["root", "=", '"/a"', "#", f"{tmp_path}/config.toml.d/a.toml:2"]
    assert lines["state"].endswith("# command line") and lines["listen"].endswith("# default")
    again = tmp_path / "again.toml"
    again.write_text(result.output)
    assert load(again, {}) == load(path, {"server.state": "/s"})


def test_check_reports_each_problem(tmp_path: Path) -> None:
    path = write(tmp_path, a="[images]\npined = []\npinnd = []\n")
    result = CliRunner().invoke(command, ["check", str(path)])
    assert result.exit_code != 0 and result.output.count("did you mean pinned?") == 2
    (tmp_path / "config.toml.d" / "a.toml").write_text("")
    result = CliRunner().invoke(command, ["check", str(path)])
    assert result.output == f"{path}: ok\n{tmp_path}/config.toml.d/a.toml: ok\n"


def test_check_reports_all_errors_at_once(tmp_path: Path) -> None:
    """One run reports the unknown key and every value of a wrong type, choice or form, each with
    its file and line."""
    path = tmp_path / "config.toml"
    path.write_text(
        '[server]\nlog_level = "loud"\nlisten = "tcp://1"\nroot = 3\n[cgroup]\ndrivr ='
        ' "x"\n[metrics]\naddress = "nope"\n[network]\nbuiltin = ["x", "y"]\n[containers]\nrlimits'
        ' = ["NOFILE"]\n[runtimes.x]\nbinary = "rel"\n'
    )
    (tmp_path / "config.toml.d").mkdir()
    (tmp_path / "config.toml.d" / "a.toml").write_text('[images]\nstore = "zip"\n')
    result = CliRunner().invoke(command, ["check", str(path)])
    problems = [
        line.replace(f"{tmp_path}/", "").split(": ")[:2] for line in result.output.splitlines()
    ]
    assert problems == [
        ["config.toml:6", "cgroup.drivr"],
        ["config.toml:2", "server.log_level"],
        ["config.toml:4", "server.root"],
        ["config.toml.d/a.toml:2", "images.store"],
        ["config.toml:3", "server.listen"],
        ["config.toml:8", "metrics.address"],
        ["config.toml:10", "network.builtin[0]"],
        ["config.toml:10", "network.builtin[1]"],
        ["config.toml:14", "runtimes.x.binary"],
        ["config.toml:12", "containers.rlimits[0]"],
    ]
    assert "'loud' is not one of debug, error, info, warning" in result.output
    assert "'zip' is not one of auto, erofs, unpacked" in result.output
    assert str(result.exception) == "10 keys or values are wrong"


def test_check_reports_values_beyond_limits_of_the_machine(tmp_path: Path) -> None:
    path = write(tmp_path, a='[containers]\nrlimits = ["nofile=unlimited"]\n')
    result = CliRunner().invoke(command, ["check", str(path)])
    assert result.exit_code != 0
    assert str(result.exception).startswith(
        f"{tmp_path}/config.toml.d/a.toml:2: containers.rlimits[0]: "
    )


@pytest.mark.parametrize(
    ("setting", "why"),
    [
        (
            "seccomp_profile = '/absent'",
            "containers.seccomp_profile: seccomp profile '/absent': No such file",
        ),
        (
            "block_io_classes = '/absent'",
            "containers.block_io_classes: block I/O classes in /absent: ",
        ),
        ("rdt_classes = '/absent'", "containers.rdt_classes: RDT classes in /absent: "),
        ("rdt_classes = 'absent'", "containers.rdt_classes: 'absent' is not an absolute path"),
        ("hooks_dirs = ['HERE']", "containers.hooks_dirs: hook HERE/x.json: "),
        (
            "default_capabilities = ['CHOWN']",
            "containers.default_capabilities[0]: 'CHOWN' is not a capability",
        ),
        ("cdi_dirs = ['x']", "containers.cdi_dirs: 'x' is not an absolute path"),
    ],
)
def test_check_reads_named_files(tmp_path: Path, setting: str, why: str) -> None:
    path = tmp_path / "config.toml"
    (tmp_path / "x.json").write_text("{}")
    path.write_text(f"[containers]\n{setting}\n".replace("HERE", str(tmp_path)))
    result = CliRunner().invoke(command, ["check", str(path)])
    assert str(result.exception).startswith(f"{path}:2: {why.replace('HERE', str(tmp_path))}")


def test_default_is_a_file_that_can_be_used(tmp_path: Path) -> None:
    path = tmp_path / "config.toml"
    path.write_text(CliRunner().invoke(command, ["default"]).output)
    assert load(path, {}) == Config() and not list(problems(ConfigSource(path, "", {})))

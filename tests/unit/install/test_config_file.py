"""Tests that the installed configuration file describes all keys, with the code's defaults."""

from __future__ import annotations

import re
from pathlib import Path

import msgspec

from cri_server import config
from cri_server.install import config_file

SETTING = re.compile(r"^#(\w+ = .*)$", re.M)


def test_the_installed_file_changes_nothing(tmp_path: Path) -> None:
    file = tmp_path / "config.toml"
    file.write_text(config_file.text())
    assert config.load(file, {}) == config.Config()


def test_each_comment_shows_the_default(tmp_path: Path) -> None:
    file = tmp_path / "config.toml"
    file.write_text(SETTING.sub(r"\1", config_file.text()))
    assert config.load(file, {}) == config.Config()


def test_every_key_occurs_once_with_an_explanation() -> None:
    tables = msgspec.to_builtins(config.Config())
    tables["runtimes.NAME"] = msgspec.to_builtins(config.model.RuntimeConfig())
    named = {f"{table}.{key}" for table, keys in tables.items() for key in keys}
    described = [
        f"{section.name}.{key.name}" for section in config_file.sections() for key in section.keys
    ]
    assert set(described) == named and len(described) == len(named)
    unexplained = [
        f"{section.name}.{key.name}" for section in config_file.sections() for key in section.keys
        if not key.about.endswith(".") or not section.about.endswith(".")
    ]  # fmt: skip
    assert not unexplained, (
        "give each a description in cri_server/config/model.py: one or two sentences"
    )


def test_the_document_has_the_same_tables() -> None:
    page = (Path(__file__).parents[3] / "docs/configure.md").read_text()
    assert config_file.markdown() in page, (
        "put the output of `python -m cri_server.install.config_file` there"
    )

"""Tests the reading of systemd's unit files."""

from __future__ import annotations

from pathlib import Path

from cri_server.systemd.units import service_settings


def settings(tmp_path: Path, content: bytes) -> list[tuple[str, str]]:
    file = tmp_path / "a.service"
    file.write_bytes(content)
    return list(service_settings(file))


def test_comments_do_not_reach_a_continued_command(tmp_path: Path) -> None:
    content = (
        b"[Unit]\nExecStart=other\n[Service]\n"
        b"# a comment is not continued \\\n"
        b"ExecStart=/usr/bin/kubelet \\\n"
        b"# --old-flag \\\n"
        b"  ; nor this\n"
        b"  --flag=1 \\\n"
        b"\t--other\n"
        b"Type = notify\n"
    )
    command = "/usr/bin/kubelet --flag=1 --other"
    assert settings(tmp_path, content) == [("ExecStart", command), ("Type", "notify")]


def test_a_unit_may_end_with_a_continued_line(tmp_path: Path) -> None:
    assert settings(tmp_path, b"[Service]\nA=1 \\") == [("A", "1")]
    assert settings(tmp_path, b"[Service]\nA=1 \\\\\nB=2") == [("A", "1 \\\\"), ("B", "2")]


def test_a_comment_may_have_any_encoding(tmp_path: Path) -> None:
    assert settings(tmp_path, b"[Service]\n# na\xefve\nA=1\n") == [("A", "1")]
    assert settings(tmp_path, b"[Service]\nA=\xff\n") == [("A", "\ufffd")]

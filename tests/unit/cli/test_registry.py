"""Tests `registry explain`, which prints files, hosts in order and sources of credentials, but no
secrets."""

from __future__ import annotations

import base64
import json
from pathlib import Path

from click.testing import CliRunner

from cri_server.cli.images.registry import registry

HOSTS = """
[host."https://m.example/prefix"]
capabilities = ["pull"]
ca = "ca.crt"
rewrite = { "^library/" = "mirror/" }
[host."https://m.example/prefix".auth]
username = "u"
password = "hidden1"
[host."http://clear.example"]
proxy = "socks5://u:hidden4@p.example"
[host."http://clear.example".header]
X-Key = "hidden2"
"""


def run(tmp_path: Path, image: str, settings: str = "") -> str:
    text = f'[registry]\nconfig_path = "{tmp_path}/certs.d"\n{settings}\n'
    (tmp_path / "config.toml").write_text(text)
    login = {"auth": base64.b64encode(b"u:hidden3").decode()}
    (tmp_path / "auth.json").write_text(
        json.dumps({"auths": {"https://index.docker.io/v1/": login}})
    )
    arguments = [
        "explain",
        image,
        "--config",
        f"{tmp_path}/config.toml",
        "--authfile",
        f"{tmp_path}/auth.json",
    ]
    result = CliRunner().invoke(registry, arguments)
    assert result.exit_code == 0, result.output
    return result.output.replace(str(tmp_path), "DIR")


def test_explain_prints_mirrors_rewrites_and_logins(tmp_path: Path) -> None:
    folder = tmp_path / "certs.d" / "docker.io"
    folder.mkdir(parents=True)
    (folder / "hosts.toml").write_text(HOSTS)
    lines = run(tmp_path, "busybox")
    assert lines.splitlines() == [
        "image: docker.io/library/busybox:latest",
        "config_path: DIR/certs.d (DIR/config.toml:2)",
        "read: DIR/certs.d/docker.io/hosts.toml",
        "1. https://m.example/prefix/v2/mirror/busybox",
        "   mirror: may pull",
        "   rewrite: library/busybox is mirror/busybox there",
        "   TLS: authority DIR/certs.d/docker.io/ca.crt",
        "   pull secrets: those for docker.io",
        "   without one: auth of DIR/certs.d/docker.io/hosts.toml",
        "2. http://clear.example/v2/library/busybox",
        "   mirror: may pull and resolve",
        "   proxy: socks5://p.example",
        "   headers: X-Key",
        "   pull secrets: only those for clear.example: the connection is not encrypted",
        "3. https://registry-1.docker.io/v2/library/busybox",
        "   the registry: may pull and resolve",
        "   pull secrets: those for docker.io",
        "signatures: not checked",
        "`pyrunc-cri pull` without --creds: DIR/auth.json: https://index.docker.io/v1/",
    ]
    assert "hidden" not in lines


def test_explain_prints_a_registry_without_files(tmp_path: Path) -> None:
    lines = run(tmp_path, "r.example/a:1").splitlines()
    assert lines[2:4] == ["read: no file", "1. https://r.example/v2/a"]
    assert lines[-1] == "`pyrunc-cri pull` without --creds: no login"


def test_explain_shows_the_signature_policy(tmp_path: Path) -> None:
    signed = {
        "type": "sigstoreSigned",
        "keyPath": "/k.pub",
        "signedIdentity": {"type": "matchRepository"},
    }
    content = {"default": [{"type": "reject"}], "transports": {"docker": {"r.example": [signed]}}}
    (tmp_path / "policy.json").write_text(json.dumps(content))
    setting = f'signature_policy = "{tmp_path}/policy.json"'
    lines = run(tmp_path, "r.example/a:1", setting)
    assert (
        "signatures: sigstoreSigned by /k.pub, matchRepository (DIR/policy.json, r.example)\n"
        in lines
    )
    assert "signatures: reject (DIR/policy.json, default)\n" in run(tmp_path, "busybox", setting)

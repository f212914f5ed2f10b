"""Tests logins from kubelet's credential providers and docker's helpers: the images that get one,
and errors."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from cri_server.cli.images import credential_helpers as helpers
from cri_server.cli.images import credentials
from pyrunc.errors import PeerError, WrongState

CONFIG = """
apiVersion: kubelet.config.k8s.io/v1
kind: CredentialProviderConfig
providers:
  - name: cloud
    matchImages: ["*.cloud.example", "r.example:5000/team"]
    defaultCacheDuration: "0"
    apiVersion: credentialprovider.kubelet.k8s.io/v1
    args: [get]
    env: [{name: WHO, value: robot}]
"""
PROVIDER = """#!/bin/sh
cat > "$0.request"
echo '{"kind": "CredentialProviderResponse", "cacheKeyType": "Image", "auth": {
  "*.cloud.example": {"username": "wide", "password": "w"},
  "a.cloud.example/team": {"username": "'$WHO-$1'", "password": "narrow"}}}'
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "providers"
    (path / "bin").mkdir(parents=True)
    (path / "1.yaml").write_text(CONFIG)
    program(path / "bin" / "cloud", PROVIDER)
    monkeypatch.setenv(helpers.FOLDER_VARIABLE, str(path))
    monkeypatch.setenv("REGISTRY_AUTH_FILE", str(tmp_path / "auth.json"))
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    return path


def program(path: Path, text: str) -> None:
    path.write_text(text)
    path.chmod(0o755)


@pytest.mark.parametrize(
    ("pattern", "name", "same"),
    [
        ("r.example", "r.example/a", True),
        ("*.io", "k8s.io/a", True),
        ("*.io", "a.k8s.io/a", False),
        ("app*.k8s.io", "app1.k8s.io/a", True),
        ("r.example/a", "r.example/ab", True),
        ("r.example/b", "r.example/a", False),
        ("r.example:5000", "r.example/a", False),
        ("r.example", "r.example:5000/a", True),
        ("https://r.example", "r.example/a", True),
        ("r.*", "r.example/a", True),
        ("R.example:443/a", "r.example/a", True),
        ("r.example:443", "r.example:5000/a", False),
    ],
)
def test_patterns_match_images(pattern: str, name: str, same: bool) -> None:
    assert helpers.matches(pattern, name) == same


def test_a_provider_gets_kubelets_request(folder: Path) -> None:
    login = credentials.find("a.cloud.example/team/app:v1")
    assert login is not None
    assert (login.username, login.password, login.server_address) == (
        "robot-get",
        "narrow",
        "a.cloud.example",
    )
    assert json.loads((folder / "bin" / "cloud.request").read_text()) == {
        "apiVersion": "credentialprovider.kubelet.k8s.io/v1",
        "kind": "CredentialProviderRequest",
        "image": "a.cloud.example/team/app:v1",
    }
    wide = credentials.find("b.cloud.example/x")
    assert wide is not None and wide.username == "wide"
    assert credentials.find("other.example/x") is None
    assert credentials.source("a.cloud.example/x") == f"{folder}/1.yaml: provider cloud"


def test_a_helper_of_dockers_configuration_is_used(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "auth.json").write_text(
        json.dumps({"credHelpers": {"r.example": "box", "t.example": "token"}})
    )
    program(
        tmp_path / "docker-credential-box",
        '#!/bin/sh\necho "{\\"Username\\": \\"$1\\", \\"Secret\\": \\"$(cat)\\"}"\n',
    )
    program(
        tmp_path / "docker-credential-token",
        '#!/bin/sh\necho \'{"Username": "<token>", "Secret": "t"}\'\n',
    )
    login = credentials.find("r.example/a")
    assert login is not None and (login.username, login.password) == ("get", "r.example")
    token = credentials.find("t.example/a")
    assert token is not None and token.identity_token == "t" and not token.username
    assert credentials.source("r.example/a") == f"{tmp_path}/auth.json: helper box"


STORE = """#!/bin/sh
read -r key
case $key in
r.example | https://index.docker.io/v1/)
    echo "{\\"Username\\": \\"u\\", \\"Secret\\": \\"$key\\"}" ;;
*) echo "credentials not found in native keychain"; exit 1 ;;
esac
"""


def test_the_store_of_dockers_configuration_is_used(folder: Path, tmp_path: Path) -> None:
    program(tmp_path / "docker-credential-box", STORE)
    (tmp_path / "auth.json").write_text(
        json.dumps(
            {
                # `docker login` with a credsStore writes an entry without a secret.
                "auths": {"r.example": {}, "gone.example": {}, "own.example": {"auth": "dTpw"}},
                "credsStore": "box",
            }
        )
    )
    for reference, password in (
        ("r.example/a", "r.example"),
        # The helper runs even if `auths` has no entry: a cloud's helper needs none.
        ("busybox", credentials.DOCKERS_NAME),
        ("own.example/a", "p"),
        ("gone.example/a", None),
        ("other.example/a", None),
        ("a.cloud.example/team/x", "narrow"),
    ):
        login = credentials.find(reference)
        assert (login.password if login else None) == password, reference
    assert credentials.source("r.example/a") == f"{tmp_path}/auth.json: helper box"


def test_a_store_that_is_not_installed_is_an_error_for_its_registries_only(
    folder: Path, tmp_path: Path
) -> None:
    (tmp_path / "auth.json").write_text(
        json.dumps({"auths": {"r.example": {}}, "credsStore": "none"})
    )
    assert credentials.find("other.example/a") is None
    with pytest.raises(PeerError, match="docker-credential-none"):
        credentials.find("r.example/a")


def test_an_empty_login_is_none(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "auth.json").write_text(json.dumps({"auths": {"r.example": {}}}))
    assert credentials.find("r.example/a") is None


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("#!/bin/sh\necho broken >&2; exit 3\n", "failed with exit code 3: broken"),
        ("#!/bin/sh\necho hidden-secret\n", "returned malformed JSON"),
        ("", "Exec format error"),
    ],
)
def test_an_error_names_the_program_and_hides_its_output(folder: Path, text: str, why: str) -> None:
    program(folder / "bin" / "cloud", text)
    with pytest.raises(PeerError) as caught:
        credentials.find("a.cloud.example/x")
    assert "bin/cloud" in str(caught.value) and why in str(caught.value)
    assert "hidden-secret" not in str(caught.value)


@pytest.mark.parametrize(
    ("name", "why"),
    [("../x", "the name of provider ../x contains"), ("x", "provider x: apiVersion is 'v1', not")],
)
def test_an_error_names_the_wrong_file(folder: Path, name: str, why: str) -> None:
    (folder / "2.yaml").write_text(
        f"providers: [{{name: {name}, matchImages: [], apiVersion: v1}}]"
    )
    with pytest.raises(WrongState, match=rf"2\.yaml: {why}"):
        credentials.find("a.cloud.example/x")


@pytest.mark.parametrize(
    "key", ["R.example", "r.example:443", "https://R.example:443/v2/", "r.example/team"]
)
def test_a_login_applies_to_all_spellings_of_its_registry(
    folder: Path, tmp_path: Path, key: str
) -> None:
    file = tmp_path / "auth.json"
    file.write_text(json.dumps({"auths": {key: {"auth": "dTpw"}}}))
    for image in ("r.example/team/a", "R.EXAMPLE/team/a", "r.example:443/team/a"):
        login = credentials.find(image)
        assert login is not None and (login.username, login.server_address) == ("u", "r.example")
    assert credentials.find("r.example:5000/team/a") is None


def test_a_login_replaces_one_for_another_spelling_of_the_registry(
    folder: Path, tmp_path: Path
) -> None:
    credentials.save("R.example:443", "old", "p", None)
    credentials.save("r.example", "new", "p", None)
    assert list(json.loads((tmp_path / "auth.json").read_text())["auths"]) == ["r.example"]
    assert credentials.forget("R.EXAMPLE", None) == ["r.example"]

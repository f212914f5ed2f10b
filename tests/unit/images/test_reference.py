"""Tests the spellings of image references and their meaning."""

from __future__ import annotations

import string

import pytest
from hypothesis import given
from hypothesis import strategies as some

from cri_server.images.formats.reference import Reference, is_digest, is_id, normal_registry
from pyrunc.errors import Error, InvalidArgument, Unsupported

D = "sha256:" + "a1" * 32


@pytest.mark.parametrize(
    ("text", "full"),
    [
        ("busybox", "docker.io/library/busybox:latest"),
        ("busybox:1.36", "docker.io/library/busybox:1.36"),
        ("user/app", "docker.io/user/app:latest"),
        ("docker.io/busybox", "docker.io/library/busybox:latest"),
        ("index.docker.io/a/b:c", "docker.io/a/b:c"),
        ("registry.k8s.io/pause:3.10", "registry.k8s.io/pause:3.10"),
        ("localhost/a", "localhost/a:latest"),
        ("localhost:5000/a/b/c:d", "localhost:5000/a/b/c:d"),
        ("host:5000/a", "host:5000/a:latest"),
        ("[::1]:5000/a:b", "[::1]:5000/a:b"),
        ("HOST/a", "HOST/a:latest"),
        (f"busybox@{D}", f"docker.io/library/busybox@{D}"),
        (f"host.x/a:tag@{D}", f"host.x/a@{D}"),
        ("f/a__b.c-d---e:T_a.g-1", "docker.io/f/a__b.c-d---e:T_a.g-1"),
    ],
)
def test_a_reference_is_completed_to_its_full_form(text: str, full: str) -> None:
    reference = Reference.parse(text)
    assert str(reference) == full
    assert Reference.parse(full) == (
        reference if reference.digest is None or reference.tag is None else Reference.parse(full)
    )


@pytest.mark.parametrize(
    "text",
    [
        "",
        "/",
        "a/",
        "/a",
        "a//b",
        "a:",
        ":a",
        "a:b:c",
        "@",
        f"@{D}",
        "a@",
        "a@sha256:1",
        f"a@{D}1",
        "A",
        "a/B",
        "a b",
        "a\n",
        "-a",
        "a-",
        "a..b",
        "a/./b",
        "a/../b",
        "_a",
        "a:-x",
        "a:" + "t" * 129,
        "a" * 256,
        "host:/a",
        "ho_st.x/a",
        "http://h/a",
        "é",
    ],
)
def test_malformed_references_are_refused(text: str) -> None:
    with pytest.raises(InvalidArgument, match="image "):
        Reference.parse(text)


@pytest.mark.parametrize(
    "text", ["a@sha384:" + "0" * 96, "a@sha256:" + "A" * 64, "a@md5:" + "0" * 32]
)
def test_unsupported_digests_are_refused(text: str) -> None:
    with pytest.raises(Unsupported, match="only sha256"):
        Reference.parse(text)


@given(some.text(string.ascii_letters + string.digits + ".:/@-_[] \n", max_size=60))
def test_accepted_references_are_stable_and_safe(text: str) -> None:
    try:
        reference = Reference.parse(text)
    except Error:
        return
    again = Reference.parse(str(reference))
    assert (again.name, again.tag if not reference.digest else None) == (
        reference.name,
        None if reference.digest else reference.tag,
    )
    assert ".." not in reference.path.split("/") and not set(" \n") & set(str(reference))


SPELLINGS = {
    "docker.io": [
        "index.docker.io",
        "registry-1.docker.io",
        "Docker.IO",
        "docker.io:443",
        "INDEX.docker.io:0443",
        "docker.io.",
    ],
    "r.example": ["R.Example", "r.example:443", "r.example:0443", "r.example."],
    "r.example:80": ["R.example:080"],
    "localhost": ["LOCALHOST", "localhost:80"],
    "localhost:443": ["Localhost:0443"],
    "127.0.0.1:5000": [
        "127.1:5000",
        "0x7f.0.0.1:5000",
        "2130706433:5000",
        "017700000001:5000",
        "[::ffff:7f00:1]:5000",
    ],
    "10.0.0.5": ["10.5:443", "0xA.0.0.5", "[::FFFF:a00:5]"],
    "[::1]:5000": ["[0:0:0:0:0:0:0:1]:5000", "[0::0001]:05000"],
    "[fd00::1]": ["[FD00::1]:443"],
    "999.999.999.999": ["999.999.999.999:443"],
    "10.example": ["10.example:443"],
}


@pytest.mark.parametrize(("normal", "spellings"), SPELLINGS.items())
def test_all_spellings_of_a_registry_have_the_same_normal_form(
    normal: str, spellings: list[str]
) -> None:
    assert {normal_registry(spelling) for spelling in (normal, *spellings)} == {normal}


def test_different_registries_have_different_normal_forms() -> None:
    assert len({normal_registry(normal) for normal in SPELLINGS}) == len(SPELLINGS)


def test_a_name_keeps_its_spelling_except_on_docker_hub() -> None:
    written = Reference.parse("R.example:443/team/app:v1")
    assert (str(written), written.repository) == ("R.example:443/team/app:v1", "r.example/team/app")
    assert (
        str(Reference.parse("Registry-1.docker.io:443/busybox"))
        == "docker.io/library/busybox:latest"
    )


@pytest.mark.parametrize("port", ["0", "65536", "99999"])
def test_an_invalid_port_is_refused(port: str) -> None:
    with pytest.raises(InvalidArgument, match=f"port {port} is out of range"):
        Reference.parse(f"r.example:{port}/a")


def test_ids_and_digests_are_recognized() -> None:
    assert (
        is_digest(D) and not is_digest(D.upper()) and not is_digest(D[:-1]) and not is_digest(None)
    )
    assert is_id(D) and is_id("a1") and is_id("sha256:a") and not is_id("busybox") and not is_id("")

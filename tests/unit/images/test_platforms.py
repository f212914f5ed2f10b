"""Tests platforms: which ones this machine runs, how builders spell them, and which image of an
index is chosen."""

from __future__ import annotations

import json

import pytest

from cri_server.images.formats import manifest as manifests
from cri_server.images.formats import platforms
from cri_server.images.formats.manifest import ImageIndex
from cri_server.images.formats.platforms import (
    Platform,
    Processor,
    host_processors,
    processors,
    rank,
)
from pyrunc.errors import InvalidArgument, NotFound

V2 = {"cx16", "lahf_lm", "popcnt", "pni", "ssse3", "sse4_1", "sse4_2"}
V3 = {*V2, "abm", "avx", "avx2", "bmi1", "bmi2", "f16c", "fma", "movbe", "xsave"}
V4 = {*V3, "avx512bw", "avx512cd", "avx512dq", "avx512f", "avx512vl"}


@pytest.mark.parametrize(
    ("machine", "flags", "expected"),
    [
        ("x86_64", set(), "amd64 386"),
        ("x86_64", V2 - {"cx16"}, "amd64 386"),
        ("x86_64", V2, "amd64/v2 amd64 386"),
        ("x86_64", V3 - V2, "amd64 386"),
        ("x86_64", V3, "amd64/v3 amd64/v2 amd64 386"),
        ("x86_64", V4, "amd64/v4 amd64/v3 amd64/v2 amd64 386"),
        ("aarch64", set(), "arm64 arm/v8 arm/v7 arm/v6 arm/v5"),
        ("armv8l", set(), "arm/v8 arm/v7 arm/v6 arm/v5"),
        ("armv7l", set(), "arm/v7 arm/v6 arm/v5"),
        ("armv6l", set(), "arm/v6 arm/v5"),
        ("armv5tel", set(), "arm/v5"),
        ("riscv64", set(), "riscv64"),
        ("ppc64le", set(), "ppc64le"),
        ("i686", set(), "386"),
    ],
)
def test_a_machine_runs_the_platforms_of_its_processor(
    machine: str, flags: set[str], expected: str
) -> None:
    runnable = processors(machine, flags)
    assert " ".join("/".join(filter(None, processor)) for processor in runnable) == expected


def test_this_machine_runs_images_of_its_own_platform() -> None:
    assert host_processors() and rank(manifests.host_platform(), host_processors()) is not None


SPELLINGS = [
    # who writes it, platform, uname's machine, runs
    ("buildx, kaniko, ko, Jib", "linux/amd64", "x86_64", True),
    ("AlmaLinux 10, Go's GOAMD64", "linux/amd64/v1", "x86_64", True),
    ("buildx with --platform linux/amd64/v2", "linux/amd64/v2", "x86_64", False),
    ("Debian's tools", "linux/x86_64", "x86_64", True),
    ("official images", "linux/arm64/v8", "aarch64", True),
    ("kube-controller-manager 1.17, containers/image 898", "linux/arm64", "aarch64", True),
    ("manifest-tool", "linux/aarch64", "aarch64", True),
    ("images for Graviton 4", "linux/arm64/v9", "aarch64", False),
    ("official images for Raspberry Pi OS of 32 bits", "linux/arm/v7", "aarch64", True),
    ("Docker before variants", "linux/arm", "armv7l", True),
    ("the same on a Raspberry Pi 1", "linux/arm", "armv6l", False),
    ("balena, Debian's armhf", "linux/armhf", "armv7l", True),
    ("Debian's armel", "linux/armel", "armv6l", True),
    ("official images", "linux/arm/v5", "armv7l", True),
    ("official images", "linux/386", "x86_64", True),
    ("Alpine's i386", "linux/i386", "x86_64", True),
    ("old builders: upper case", "Linux/AMD64", "x86_64", True),
    ("buildkit's attestations", "unknown/unknown", "x86_64", False),
    ("Docker Desktop's WebAssembly", "wasi/wasm", "x86_64", False),
    ("nanoserver", "windows/amd64", "x86_64", False),
    ("official images", "linux/riscv64", "riscv64", True),
    ("official images", "linux/mips64le", "x86_64", False),
]


@pytest.mark.parametrize(("builder", "text", "machine", "runs"), SPELLINGS)
def test_spellings_of_builders_are_normalized(
    builder: str, text: str, machine: str, runs: bool
) -> None:
    system, architecture, *variant = text.split("/")
    platform = Platform(architecture, system, *variant)
    assert (rank(platform, processors(machine, set())) is not None) is runs, builder
    assert str(platform) == text


def index(*texts: str) -> ImageIndex:
    entries = []
    for number, text in enumerate(texts):
        system, _, rest = text.partition("/")
        architecture, _, variant = rest.partition("/")
        platform = {
            "os": system,
            "architecture": architecture,
            **({"variant": variant} if variant else {}),
        }
        entry = {"mediaType": manifests.OCI_MANIFEST, "digest": f"sha256:{number:064x}", "size": 7}
        entries.append(
            {**entry, "platform": platform, "annotations": {"a": "b"}} if text else entry
        )
    document = manifests.parse(json.dumps({"schemaVersion": 2, "manifests": entries}).encode())
    assert isinstance(document, ImageIndex)
    return document


AMD64_V3 = processors("x86_64", V3)
ARM64 = processors("aarch64", set())
ARMV7 = processors("armv7l", set())


@pytest.mark.parametrize(
    ("host", "texts", "expected"),
    [
        (AMD64_V3, ["linux/amd64", "linux/amd64/v2", "linux/amd64/v3", "linux/amd64/v4"], 2),
        (AMD64_V3, ["linux/amd64/v4", "linux/amd64/v2", "linux/amd64"], 1),
        (AMD64_V3, ["linux/amd64/v4", "linux/amd64", "linux/386"], 1),
        (AMD64_V3, ["linux/amd64", "linux/amd64"], 0),
        (AMD64_V3, ["", "linux/386"], 1),
        (AMD64_V3, ["linux/arm64", ""], 1),
        (ARM64, ["linux/arm/v7", "linux/arm64/v8"], 1),
        (ARM64, ["linux/arm/v6", "linux/arm/v7", "linux/arm/v5"], 1),
        (ARMV7, ["linux/arm/v5", "linux/arm/v8", "linux/arm/v6", "linux/arm64"], 2),
    ],
)
def test_the_best_image_of_an_index_is_chosen(
    monkeypatch: pytest.MonkeyPatch, host: tuple[Processor, ...], texts: list[str], expected: int
) -> None:
    monkeypatch.setattr(manifests, "host_processors", lambda: host)
    assert manifests.choose(index(*texts)).digest == f"sha256:{expected:064x}"


def test_the_error_lists_the_platforms_of_the_index(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(manifests, "host_processors", lambda: ARMV7)
    texts = ["linux/arm64/v8", "linux/amd64", "unknown/unknown", "windows/amd64", "linux/arm/v8"]
    with pytest.raises(NotFound) as caught:
        manifests.choose(index(*texts))
    there = "linux/amd64, linux/arm/v8, linux/arm64/v8, windows/amd64"
    assert caught.value.message == f"no image for linux/arm/v7; available: {there}"


def test_a_stored_image_is_preferred_to_a_better_platform(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(manifests, "host_processors", lambda: AMD64_V3)
    both = index("linux/amd64/v3", "linux/amd64", "linux/arm64", "unknown/unknown")
    # `here` has the stored images. The better one is missing if the index was pulled on another
    # processor, or if the archive has only one platform.
    for here, expected in (
        ("01", "0"),
        ("12", "1"),
        ("2", "2"),
        ("23", "2"),
        ("3", "0"),
        ("", "0"),
    ):
        assert (
            manifests.choose_stored(both, lambda digest, here=here: digest[-1] in here).digest[-1]
            == expected
        )


@pytest.mark.parametrize(
    ("text", "chosen"),
    [
        ("linux/amd64", "amd64"),
        ("linux/x86_64", "amd64"),
        ("Linux/AMD64/v3", "amd64/v3"),
        ("linux/arm64/v8", "arm64/v8"),
        ("linux/arm", "arm/v7"),
    ],
)
def test_a_requested_platform_selects_only_its_image(text: str, chosen: str) -> None:
    """The machine's own platform plays no role, and an image without a platform is never
    selected."""
    entries = [
        manifests.Descriptor(manifests.OCI_MANIFEST, f"sha256:{number:064}", 1, platform)
        for number, platform in enumerate(
            [
                None,
                Platform("amd64", "windows"),
                Platform("amd64", "linux", "v3"),
                Platform("amd64", "linux"),
                Platform("arm64", "linux", "v8"),
                Platform("arm", "linux", "v7"),
            ]
        )
    ]
    found = manifests.choose(ImageIndex(entries), platforms.parse(text)).platform
    assert str(found) == f"linux/{chosen}"
    with pytest.raises(
        NotFound, match=r"no image for linux/386; available: linux/amd64, .*linux/arm/v7"
    ):
        manifests.choose(ImageIndex(entries), platforms.parse("linux/386"))


@pytest.mark.parametrize(
    "text",
    [
        "",
        "/",
        "linux",
        "amd64",
        "linux/",
        "linux/a b",
        "linux/a/b/c",
        "linux/../x",
        "windows/amd64",
    ],
)
def test_invalid_platforms_are_refused(text: str) -> None:
    with pytest.raises(InvalidArgument, match="platform "):
        platforms.parse(text)

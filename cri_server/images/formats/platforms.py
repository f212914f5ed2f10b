"""Platforms of images: parses them, compares their spellings, and ranks those that this machine's
processor runs.

Source: OCI image specification, "Platform Variants"; Go's GOARCH, GOARM and GOAMD64; the x86-64
psABI for its levels; containerd's `platforms` for equal spellings.
"""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from functools import cache
from pathlib import Path

import msgspec

from pyrunc.errors import InvalidArgument

# uname's machine -> OCI's (Go's) name
_MACHINES = {
    "x86_64": "amd64",
    "aarch64": "arm64",
    "armv5tel": "arm",
    "armv6l": "arm",
    "armv7l": "arm",
    "armv8l": "arm",
    "i686": "386",
}

# The flags in /proc/cpuinfo that each x86-64 level adds to the one before.
_AMD64_LEVELS = (
    {"cx16", "lahf_lm", "popcnt", "pni", "ssse3", "sse4_1", "sse4_2"},
    {"abm", "avx", "avx2", "bmi1", "bmi2", "f16c", "fma", "movbe", "xsave"},
    {"avx512bw", "avx512cd", "avx512dq", "avx512f", "avx512vl"},
)

# Builders' spellings -> the compared one, which leaves out a variant that all such machines have.
_SPELLINGS = {
    ("x86_64", ""): ("amd64", ""),
    ("x86-64", ""): ("amd64", ""),
    ("amd64", "v1"): ("amd64", ""),
    ("i386", ""): ("386", ""),
    ("aarch64", ""): ("arm64", ""),
    ("aarch64", "v8"): ("arm64", ""),
    ("arm64", "8"): ("arm64", ""),
    ("arm64", "v8"): ("arm64", ""),
    ("arm64", "v8.0"): ("arm64", ""),
    ("arm", ""): ("arm", "v7"),
    ("arm", "5"): ("arm", "v5"),
    ("arm", "6"): ("arm", "v6"),
    ("arm", "7"): ("arm", "v7"),
    ("arm", "8"): ("arm", "v8"),
    ("armel", ""): ("arm", "v6"),
    ("armhf", ""): ("arm", "v7"),
}

_PART = re.compile(r"[a-z0-9][a-z0-9_.-]*")
Processor = tuple[str, str]  # architecture and variant, as _SPELLINGS has them


class Platform(msgspec.Struct, frozen=True):
    """The operating system and processor that an image runs on."""

    architecture: str = ""
    os: str = ""
    variant: str | None = None

    def __str__(self) -> str:
        parts = (self.os or "linux", self.architecture, self.variant)
        return "/".join(part for part in parts if part)


def parse(text: str) -> Platform:
    """Parse linux/ARCH or linux/ARCH/VARIANT, in upper or lower case. Raises InvalidArgument for
    anything else, such as another operating system."""
    parts = text.lower().split("/")
    if len(parts) not in (2, 3) or not all(_PART.fullmatch(part) for part in parts):
        raise InvalidArgument(f"platform {text[:100]!r} is not OS/ARCH or OS/ARCH/VARIANT")
    if parts[0] != "linux":
        raise InvalidArgument(f"platform {text[:100]!r}: only images for linux can be pulled")
    return Platform(parts[1], parts[0], parts[2] if len(parts) == 3 else None)


def processor(platform: Platform) -> Processor:
    """Return the platform's processor as `rank` compares it: different spellings of the same
    processor, such as aarch64 and arm64/v8, become equal."""
    words = platform.architecture.lower(), (platform.variant or "").lower()
    return _SPELLINGS.get(words, words)


def host_platform() -> Platform:
    """Return this machine's platform, without a variant."""
    machine = os.uname().machine
    return Platform(_MACHINES.get(machine, machine), "linux")


@cache
def host_processors() -> tuple[Processor, ...]:
    """Return the processors whose code this machine runs, best first."""
    flags: set[str] = set()
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("flags"):
                flags = set(line.partition(":")[2].split())
                break
    except OSError:
        pass  # without flags: the baseline of the architecture
    return processors(os.uname().machine, flags)


def processors(machine: str, flags: set[str]) -> tuple[Processor, ...]:
    """Return the processors whose code a machine runs, best first. `machine`: the name that
    uname(2) returns. `flags`: the flags of an x86 processor in /proc/cpuinfo.

    32-bit processors come last. They are listed without a check, because nearly all x86 kernels and
    arm64 processors run 32-bit code.
    """
    architecture = _MACHINES.get(machine, machine)
    if architecture == "amd64":
        level = 1
        while level <= len(_AMD64_LEVELS) and flags >= _AMD64_LEVELS[level - 1]:
            level += 1
        return (*(("amd64", f"v{n}") for n in range(level, 1, -1)), ("amd64", ""), ("386", ""))
    if architecture == "arm64":
        return (("arm64", ""), *_arm(8))
    if architecture == "arm":
        # uname's machine is armv6l, armv7l, …
        return _arm(int(machine[4]))
    return ((architecture, ""),)


def _arm(version: int) -> tuple[Processor, ...]:
    return tuple(("arm", f"v{n}") for n in range(version, 4, -1))


def rank(platform: Platform, host: Sequence[Processor]) -> int | None:
    """Return the position of an image's platform in `host`, the processors that the machine can
    run, best first; None if the platform is not in the list or its system is not Linux."""
    kind = processor(platform)
    if (platform.os or "linux").lower() != "linux" or kind not in host:
        return None
    return host.index(kind)

"""Launches that are kept: how many, and whose descriptors they are."""

from __future__ import annotations

import os

import pytest

from pyrunc.compiler.client import CompiledLaunch

kept_launches = pytest.importorskip("pyrunc.accelerate.kept_launches")


def launch() -> CompiledLaunch:
    return CompiledLaunch({"launch": {}}, [os.open("/dev/null", os.O_RDONLY)])


def open_count() -> int:
    return len(os.listdir("/proc/self/fd"))


def test_the_least_used_goes_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kept_launches, "MOST", 2)
    kept, before = kept_launches.KeptLaunches(), open_count()
    for key in ("a", "b", "c"):
        for _ in range(2):
            with launch() as made:
                kept.keep("container", key, made)
        if key == "b":
            kept.find("container", "a").close()
    assert open_count() == before + 2
    assert kept.find("container", "b") is None
    with kept.find("container", "a") as one, kept.find("container", "c") as other:
        assert one.compiled == other.compiled and not set(one.fds) & set(other.fds)
    kept.drop("container")
    assert open_count() == before and kept.find("container", "a") is None


def test_once_is_not_enough() -> None:
    kept, before = kept_launches.KeptLaunches(), open_count()
    for key in ("a", "b"):
        with launch() as made:
            kept.keep("container", key, made)
    assert kept.find("container", "a") is None and open_count() == before

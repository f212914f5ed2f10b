"""Tests which compiled programs of execs are stored: those of commands that are executed repeatedly
in one container."""

from __future__ import annotations

from typing import Any

from pyrunc.compile.exec import PROGRAMS_AT_MOST, ExecPrograms

NOTHING: Any = object()


def test_a_program_is_stored_when_its_inputs_come_again() -> None:
    programs = ExecPrograms()
    programs.store("probe", NOTHING, NOTHING)
    assert programs.load("probe") is None
    programs.store("probe", NOTHING, NOTHING)
    assert programs.load("probe") == (NOTHING, NOTHING)
    assert programs.load("another") is None


def test_few_programs_of_a_container_are_stored() -> None:
    programs = ExecPrograms()
    for command in range(100):
        for _ in range(2):
            programs.store(command, NOTHING, NOTHING)
    assert sum(programs.load(command) is not None for command in range(100)) == PROGRAMS_AT_MOST


def test_a_command_is_forgotten_among_many_others() -> None:
    programs = ExecPrograms()
    for command in ["probe", *range(100), "probe"]:
        programs.store(command, NOTHING, NOTHING)
    assert programs.load("probe") is None

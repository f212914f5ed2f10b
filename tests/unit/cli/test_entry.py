"""The program that callers exec: the script, and the one that is linked with the interpreter and reads a bundle."""

from __future__ import annotations

import marshal
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import pyrunc
from pyrunc.cli.entry import script
from pyrunc.cli.pack import WORKS, bundle
from tests.support.bundle import runtime

PACKAGE = Path(pyrunc.__file__).parent


def test_the_script_is_isolated_with_a_fixed_path() -> None:
    text = script("/usr/bin/python3", ["/a", "/b"])
    assert text.startswith("#!/usr/bin/python3 -IS\n") and "sys.path += ['/a', '/b']" in text
    compile(text, "pyrunc", "exec")


def version(program: Path) -> str:
    done = subprocess.run([program, "--version"], capture_output=True, text=True, check=True, env={})
    return done.stdout.splitlines()[0]


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a copy of the package, of the interpreter, and in `bin` the program that was made of these."""
    folder = tmp_path_factory.mktemp("installed")
    shutil.copytree(PACKAGE, folder / "pyrunc", ignore=shutil.ignore_patterns("__pycache__", "pyrunc-*"))
    shutil.copy(os.path.realpath(sys.executable), folder / "python3")
    (folder / "bin").mkdir()
    command = [folder / "python3", "-m", "pyrunc.cli.entry", "install", "bin"]
    subprocess.run(command, check=True, cwd=folder, env={"PATH": os.environ["PATH"]})
    return folder


def test_the_program_takes_its_modules_from_the_bundle_unless_they_changed(installed: Path) -> None:
    program, source = installed / "bin/pyrunc", installed / "pyrunc/__init__.py"
    assert program.read_bytes().startswith(b"\x7fELF"), (
        "Python's static library should be here (libpython3-dev)"
    )
    text = source.read_text()
    assert version(program) == f"pyrunc version {pyrunc.__version__}"
    assert not list(installed.rglob("__pycache__/fast.*")), "it was read from its source"
    source.write_text(text.replace(pyrunc.__version__, "77.7"))
    assert version(program) == "pyrunc version 77.7"
    with open(installed / "pyrunc/errors.py", "a") as file:
        file.write("# one in the middle of what is made in one go\n")
    assert version(program) == "pyrunc version 77.7"
    assert list(installed.rglob("__pycache__/errors.*")) and not list(installed.rglob("__pycache__/fast.*"))


def test_modules_are_made_after_what_they_import(installed: Path) -> None:
    packed = bundle(str(installed / "pyrunc"), [])
    head = 8 + int.from_bytes(packed[:8], "little")
    _, _, index, batches = marshal.loads(packed[8:head])
    assert {name for work in WORKS for name in work} <= set(index)
    orders = [list(marshal.loads(packed[head + at : head + at + length])) for at, length in batches]
    assert sorted(name for order in orders for name in order) == sorted(n for n in index if index[n][0] >= 0)
    together = max(orders, key=len)
    assert len(together) > 30
    for before, after in (
        ("plan.model", "plan.build"),
        ("plan.build", "lifecycle.create"),
        ("plan", "plan.model"),
    ):
        assert together.index(f"pyrunc.{before}") < together.index(f"pyrunc.{after}")
    # These are wanted without a new container too, whose modules would all come along.
    for elsewhere in (
        "cgroups.group",
        "lifecycle.status",
        "lifecycle.delete",
        "lifecycle.again",
        "lifecycle.run",
    ):
        assert f"pyrunc.{elsewhere}" not in together


# The importer of the program, in an ordinary interpreter: prints the modules that cannot be the first after its own.
EACH_FIRST = """
import marshal, os, sys, types
from pyrunc.cli.pack import bundle
packed = memoryview(bundle("pyrunc", []))
sys.modules["_pyrunc"] = types.SimpleNamespace(bundle=lambda: packed, is_unchanged=lambda *_: True, call=None, address=None)
text = open("pyrunc/cli/bundled.py").read().partition("gc.disable()")[0]
exec(compile(text, "bundled", "exec"))
for name in [name for name in sys.modules if name.startswith("pyrunc")]:
    del sys.modules[name]
install()
importer = sys.meta_path[0]
assert type(importer).__name__ == "Importer"
for name, entry in importer.index.items():
    if entry[0] == EXTENSION or name in ("pyrunc.cli.bundled", "pyrunc.cli.people"):  # itself; click is not there
        continue
    child = os.fork()
    if child == 0:
        try:
            __import__("pyrunc.cli.main")  # as the program does
            __import__(name)
            assert sys.modules[name].__spec__.loader is importer
        except BaseException as error:
            print(name, repr(error))
        sys.stdout.flush()
        os._exit(0)
    os.waitpid(child, 0)
print(len(importer.index) > 100, flush=True)
os._exit(0)
"""


def test_each_module_can_be_the_first_that_a_command_imports(installed: Path) -> None:
    """Making a batch must not need one that is on its way; what a module imports through a function shows only here."""
    command = [str(installed / "python3"), "-c", EACH_FIRST]
    done = subprocess.run(command, cwd=installed, capture_output=True, text=True, check=True, env={})
    assert done.stdout == "True\n" and not done.stderr


def test_the_program_gives_way_to_the_script_when_the_interpreter_is_another_one(installed: Path) -> None:
    program, python = installed / "bin/pyrunc", installed / "python3"
    trace = ["strace", "-f", "-e", "execve", "-qq", str(program), "--version"]

    def executed() -> list[str]:
        text = subprocess.run(trace, capture_output=True, text=True, check=True, env={}).stderr
        return [line.partition('"')[2].partition('"')[0] for line in text.splitlines() if "execve(" in line]

    assert executed() == [str(program)]
    os.utime(python, ns=(1, 1))
    assert executed() == [str(program), str(python)]


def test_what_is_under_test_is_the_program_that_was_made_here() -> None:
    """pip writes a script of its own, which loads `site` and takes four times as long, when it comes last."""
    program = runtime()[0]
    if "PYRUNC_RUNTIME" not in os.environ:
        assert Path(program).read_bytes().startswith(b"\x7fELF"), f"{program}: make build"

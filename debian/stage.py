"""Writes the package's files besides the Python modules: `python -P debian/stage.py debian/pyrunc`,
in a built tree.

The files are the programs, the CNI plugins, all of cri_server/install and, for debhelper, the unit,
tmpfiles.d, the trigger that takes a new snapshot when the interpreter changes, and the
dependencies.
"""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
from pathlib import Path

from cni_plugins.protocol import builtin
from cri_server.cli.server.install_node import command_lines
from cri_server.install import files
from cri_server.install.node import PACKAGE, PACKAGED_PLUGINS
from pyrunc.cli import entry

DEBIAN = Path(__file__).parent
# files that debhelper installs, together with its parts of the maintainer scripts
DEBHELPERS = {
    "systemd/system/pyrunc-cri.service": "pyrunc.pyrunc-cri.service",
    "tmpfiles.d/pyrunc.conf": "pyrunc.tmpfiles",
}


def main(staged: Path) -> None:
    paths = entry.at(PACKAGE)
    if os.path.dirname(paths.python) != "/usr/bin":
        sys.exit(f"{paths.python} is not Debian's interpreter: build with PYTHON=/usr/bin/python3")
    programs(staged, paths)
    plugins(staged, paths)
    for file in files.files(files.packaged("/usr/bin/pyrunc-cri"), command_lines()):
        own = next((name for end, name in DEBHELPERS.items() if file.path.endswith(end)), None)
        write(DEBIAN / own if own else staged / file.path.lstrip("/"), file.text, file.mode)
    for name in (f"python{sysconfig.get_python_version()}", "python3"):
        assert package_version(name), f"{name} is not installed as a package"
    write(
        DEBIAN / "pyrunc.triggers",
        "".join(f"interest-noawait {path}\n" for path in (paths.python, library())),
    )
    write(DEBIAN / "pyrunc.substvars", substitutions())


def programs(staged: Path, paths: entry.InstallPaths) -> None:
    """Write the programs. `pyrunc` is compiled; it falls back to the script, but a package without
    it is not built."""
    text = entry.script(paths.python, paths.searched)
    write(staged / paths.script.lstrip("/"), text, 0o755)
    server = text.replace("import os, sys\n", "import sys\n").replace(
        "from pyrunc.cli.main import main\nos._exit(main())\n",
        "from cri_server.cli.main import main\nmain()\n",
    )
    write(staged / "usr/bin/pyrunc-cri", server, 0o755)
    if not entry.compile_program(str(staged / "usr/bin/pyrunc"), paths):
        sys.exit("the program pyrunc needs cc and Python's static library (python3-dev)")


def plugins(staged: Path, paths: entry.InstallPaths) -> None:
    """Write the CNI plugins into the package's own folder, because the package kubernetes-cni has
    files of the same names in /opt/cni/bin."""
    search_path = [library(), f"{library()}/lib-dynload", *paths.searched]
    for name in builtin.MODULES:
        write(
            staged / PACKAGED_PLUGINS.lstrip("/") / name,
            builtin.script(name, paths.python, search_path),
            0o755,
        )


def library() -> str:
    return sysconfig.get_path("stdlib")


def substitutions() -> str:
    """Return the dependencies: the modules are compiled for one minor version of Python, and the
    program contains the interpreter."""
    major, minor = sys.version_info[:2]
    version = sysconfig.get_python_version()
    interpreter = f"python3 (>= {version}), python3 (<< {major}.{minor + 1}), python{version}"
    source = f"python{version} (= {package_version(f'python{version}')})"
    return f"python:Depends={interpreter}\npython:Built-Using={source}\n"


def package_version(name: str) -> str:
    """Return the version of an installed package's source."""
    command = ["dpkg-query", "-W", "-f", "${source:Version}", name]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def write(path: Path, text: str, mode: int = 0o644) -> None:
    path.parent.mkdir(mode=0o755, parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")
    path.chmod(mode)


if __name__ == "__main__":
    main(Path(sys.argv[1]))

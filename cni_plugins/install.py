"""Write our plugins as executables into a folder, for any CNI runtime: `python -m cni_plugins.install DIR`.

Each is a script for an isolated interpreter (-I: no environment, no user site; -S: no site-packages hooks) whose import
path is fixed when it is written. A mark tells them from foreign ones: our server need not run what it has built in.
"""

from __future__ import annotations

import os
import sys

from cni_plugins.protocol.builtin import MARK, MODULES


def script(name: str, path: list[str]) -> str:
    """The executable `name` with the import path `path`."""
    return "\n".join(
        (
            f"#!{sys.executable} -IS",
            MARK.decode(),
            "import sys",
            f"sys.path[:] = {path!r}",
            f"from {MODULES[name]} import main",
            "main()",
            "",
        )
    )


def import_path() -> list[str]:
    """This interpreter's standard library and site-packages, and the folder that holds this package; absolute."""
    own = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    found = [own, *(p for p in sys.path if p and os.path.isabs(p) and os.path.exists(p))]
    return list(dict.fromkeys(found))


def install(folder: str) -> list[str]:
    """Write all executables into `folder`, which is made; returns their paths. Raises OSError."""
    os.makedirs(folder, mode=0o755, exist_ok=True)
    written = []
    for name in MODULES:
        path = os.path.join(folder, name)
        temporary = f"{path}.{os.getpid()}.tmp"
        with open(temporary, "w", encoding="utf-8") as file:
            os.fchmod(file.fileno(), 0o755)
            file.write(script(name, import_path()))
        os.rename(temporary, path)
        written.append(path)
    return written


def main() -> int:
    if len(sys.argv) != 2 or sys.argv[1].startswith("-"):
        print("usage: python -m cni_plugins.install DIR", file=sys.stderr)
        return 2
    try:
        for path in install(sys.argv[1]):
            print(path)
    except OSError as error:
        print(f"cannot install: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())

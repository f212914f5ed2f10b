"""Writes pyrunc's plugins into a folder, as executables for any CNI runtime. Usage: `python -m
cni_plugins.install DIR`."""

from __future__ import annotations

import os
import sys

from cni_plugins.protocol.builtin import MODULES, import_path, script


def install(folder: str) -> list[str]:
    """Write all plugins as executables into `folder`, which is made if it is missing; return their
    paths. Raises OSError."""
    os.makedirs(folder, mode=0o755, exist_ok=True)
    written = []
    for name in MODULES:
        path = os.path.join(folder, name)
        temporary = f"{path}.{os.urandom(8).hex()}.tmp"
        with open(temporary, "x", encoding="utf-8") as file:  # "x": never through a link
            os.fchmod(file.fileno(), 0o755)
            file.write(script(name, sys.executable, import_path()))
        # A runtime may execute the plugin at this moment: it finds the old file or the new one,
        # whole.
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

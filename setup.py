"""What pyproject.toml cannot say: the wheel's tag. Everything else is there.

The wheel holds three programs and a library for one machine and no extension module: any Python 3,
this architecture. They are without a C library, so both families of Linux distributions can run
them.
"""

from __future__ import annotations

import os
import platform

from setuptools import Distribution, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.errors import FileError

ROOT = os.path.dirname(os.path.abspath(__file__))
BUILT = [
    "pyrunc/native/launcher",
    "pyrunc/native/pause",
    "pyrunc/native/keeper",
    "cri_server/api/api_pb2.py",
    "cri_server/api/api_pb2_grpc.py",
]


class Binary(Distribution):
    """Its files belong into platlib, though none is an extension module."""

    def has_ext_modules(self) -> bool:
        return True


class Wheel(bdist_wheel):
    """A wheel for this machine's architecture."""

    def get_tag(self) -> tuple[str, str, str]:
        machine = platform.machine()
        return "py3", "none", f"manylinux_2_17_{machine}.musllinux_1_1_{machine}"

    def run(self) -> None:
        if missing := [name for name in BUILT if not os.path.exists(os.path.join(ROOT, name))]:
            raise FileError(f"{', '.join(missing)}: not built; run `make build` first")
        super().run()


setup(distclass=Binary, cmdclass={"bdist_wheel": Wheel})

"""One server of ours for the archives of a file; each test starts with none of its pods."""

from __future__ import annotations

from tests.cri.conftest import server
from tests.vm.counting import module_server

__all__ = ["module_server", "server"]

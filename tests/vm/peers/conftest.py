"""Provides one server of ours for the tests of a file; each test starts without pods."""

from __future__ import annotations

from tests.cri.conftest import server
from tests.vm.counting import module_server

__all__ = ["module_server", "server"]

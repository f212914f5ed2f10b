"""Provides the fixtures of tests/vm/kubelet."""

from tests.vm.kubelet.conftest import node, removing

__all__ = ["node", "removing"]

"""Provides the node of the kubelet's tests."""

from tests.vm.kubelet.conftest import node, removing

__all__ = ["node", "removing"]

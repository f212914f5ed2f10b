"""Tests a server that may open no more descriptors for a while."""

from __future__ import annotations

import os
import resource
import signal
import time

import grpc

from cri_server.api import api_pb2 as api
from tests.cri.server_harness import Server, server_fixture
from tests.cri.test_recovery import shim_pid
from tests.support.processes import wait_until

server = server_fixture("function", network=False)


def test_pods_survive_the_loss_of_their_shim_meanwhile(server: Server) -> None:
    container = server.launch(pod := server.run_pod(host_network=True))
    limits = resource.prlimit(server.pid, resource.RLIMIT_NOFILE)
    resource.prlimit(server.pid, resource.RLIMIT_NOFILE, (3, limits[1]))
    os.kill(shim_pid(server, pod), signal.SIGKILL)
    time.sleep(5)
    resource.prlimit(server.pid, resource.RLIMIT_NOFILE, limits)
    assert wait_until(lambda: echoes(server, container), 30, 0.5), server.tail()
    assert server.status(container).state == api.CONTAINER_RUNNING


def echoes(server: Server, container: str) -> bool:
    try:
        return server.exec(container, "echo", "x").stdout == b"x\n"
    except grpc.RpcError:
        return False

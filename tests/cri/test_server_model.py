"""Compares a server in random sequences of calls and crashes with a model of CRI's promises: the
answers are equal, and nothing is left."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import grpc
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from cri_server.api import api_pb2 as api
from tests.cri.server_harness import Server, code_of

REFUSED = grpc.StatusCode.FAILED_PRECONDITION


@dataclass
class Pod:
    config: api.PodSandboxConfig
    ready: bool = True
    containers: dict[str, int] = field(default_factory=dict)  # id -> state


class Calls(RuleBasedStateMachine):
    """Uses one server for all sequences; each sequence begins and ends without pods."""

    server: Server
    numbers = 0

    def __init__(self) -> None:
        super().__init__()
        self.pods: dict[str, Pod] = {}

    def _pod(self, data: Any) -> str:
        return data.draw(st.sampled_from(sorted(self.pods)))  # type: ignore[no-any-return]

    def _container(self, data: Any) -> tuple[str, str]:
        pairs = sorted((p, c) for p, pod in self.pods.items() for c in pod.containers)
        return data.draw(st.sampled_from(pairs))  # type: ignore[no-any-return]

    def _has_containers(self) -> bool:
        return any(pod.containers for pod in self.pods.values())

    @precondition(lambda self: len(self.pods) < 3)
    @rule(host_network=st.booleans())
    def run_pod(self, host_network: bool) -> None:
        config = self.server.pod_config()
        pod = self.server.run_pod(config, host_network=host_network)
        assert pod not in self.pods
        self.pods[pod] = Pod(config)

    @precondition(lambda self: self.pods)
    @rule(data=st.data())
    def run_the_same_pod(self, data: Any) -> None:
        identifier = self._pod(data)
        pod = self.pods[identifier]
        if pod.ready:
            assert self.server.run_pod(pod.config) == identifier
        else:
            assert (
                code_of(lambda: self.server.run_pod(pod.config)) == grpc.StatusCode.ALREADY_EXISTS
            )

    @precondition(lambda self: self.pods)
    @rule(data=st.data())
    def create(self, data: Any) -> None:
        identifier = self._pod(data)
        Calls.numbers += 1
        config = self.server.container_config(
            metadata=api.ContainerMetadata(name=f"n{Calls.numbers}"), log_path=""
        )
        if self.pods[identifier].ready:
            container = self.server.create(identifier, config)
            self.pods[identifier].containers[container] = api.CONTAINER_CREATED
        else:
            assert code_of(lambda: self.server.create(identifier, config)) == REFUSED

    @precondition(_has_containers)
    @rule(data=st.data())
    def start(self, data: Any) -> None:
        pod, container = self._container(data)
        if self.pods[pod].ready and self.pods[pod].containers[container] == api.CONTAINER_CREATED:
            self.server.start_container(container)
            self.pods[pod].containers[container] = api.CONTAINER_RUNNING
        else:
            assert code_of(lambda: self.server.start_container(container)) == REFUSED

    @precondition(_has_containers)
    @rule(data=st.data())
    def execute(self, data: Any) -> None:
        pod, container = self._container(data)
        if self.pods[pod].containers[container] == api.CONTAINER_RUNNING:
            assert self.server.output(container, "echo", "x") == "x\n"
        else:
            assert code_of(lambda: self.server.exec(container, "true")) == REFUSED

    @precondition(_has_containers)
    @rule(data=st.data())
    def stop_container(self, data: Any) -> None:
        pod, container = self._container(data)
        self.server.stop_container(container)
        if self.pods[pod].containers[container] == api.CONTAINER_RUNNING:
            self.pods[pod].containers[container] = api.CONTAINER_EXITED

    @precondition(_has_containers)
    @rule(data=st.data())
    def remove_container(self, data: Any) -> None:
        pod, container = self._container(data)
        self.server.remove_container(container)
        del self.pods[pod].containers[container]
        assert code_of(lambda: self.server.status(container)) == grpc.StatusCode.NOT_FOUND

    @precondition(lambda self: self.pods)
    @rule(data=st.data())
    def stop_pod(self, data: Any) -> None:
        identifier = self._pod(data)
        self.server.stop_pod(identifier)
        pod = self.pods[identifier]
        pod.ready = False
        for container, state in pod.containers.items():
            if state == api.CONTAINER_RUNNING:
                pod.containers[container] = api.CONTAINER_EXITED

    @precondition(lambda self: self.pods)
    @rule(data=st.data())
    def remove_pod(self, data: Any) -> None:
        identifier = self._pod(data)
        self.server.remove_pod(identifier)
        del self.pods[identifier]

    @rule(how=st.sampled_from([None, None, None, Server.kill, Server.stop]))
    def restart(self, how: Any) -> None:
        if how is not None:
            self.server.restart(how)

    @invariant()
    def the_server_says_what_the_model_says(self) -> None:
        listed = {p.id: p.state == api.SANDBOX_READY for p in self.server.pods()}
        assert listed == {identifier: pod.ready for identifier, pod in self.pods.items()}
        states = {(c.pod_sandbox_id, c.id): c.state for c in self.server.containers()}
        assert states == {
            (p, c): s for p, pod in self.pods.items() for c, s in pod.containers.items()
        }

    def teardown(self) -> None:
        self.server.remove_all()
        assert not self.server.pods() and not self.server.containers()
        assert not list((self.server.root / "containers").iterdir())


@pytest.mark.requirement("2.1", "2.4", "4.3.2", "13.14")
@pytest.mark.timeout(300)
def test_the_server_keeps_to_the_model() -> None:
    with Server() as server:
        server.load_image()
        Calls.server = server
        run_state_machine_as_test(  # type: ignore[no-untyped-call]
            Calls,
            settings=settings(
                max_examples=10,
                stateful_step_count=20,
                deadline=None,
                derandomize=True,
                database=None,
                suppress_health_check=list(HealthCheck),
            ),
        )

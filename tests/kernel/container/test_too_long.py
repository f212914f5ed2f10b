"""Arguments and environments that are as long as real ones, in a container's start and in an
exec."""

from __future__ import annotations

from pathlib import Path

import pytest

from pyrunc.compile.exec import ExecRequest, merged
from pyrunc.container.exec import execute
from pyrunc.errors import InvalidArgument
from tests.kernel.box import Box, reap

PROCESS = {"args": ["true"], "env": ["PATH=/bin"]}
ONE_STRING = "the kernel takes 131072 in one string"
TOGETHER = (
    "together and the kernel takes a quarter of the stack limit (RLIMIT_STACK) and at most 6 MiB"
)


def service_links(count: int) -> list[str]:
    """Return the variables that kubelet adds for services of one port:
    pkg/kubelet/envvars/envvars.go of Kubernetes, for the namespace of a pod without
    `enableServiceLinks: false`."""
    links = ["PATH=/bin"]
    for number in range(count):
        name, address = f"TEAM_APPLICATION_BACKEND_{number:05}", "10.96.113.207"
        port = f"{name}_PORT_8080_TCP"
        links += [
            f"{name}_SERVICE_HOST={address}", f"{name}_SERVICE_PORT=8080",
            f"{name}_PORT=tcp://{address}:8080",
            f"{port}=tcp://{address}:8080", f"{port}_PROTO=tcp", f"{port}_PORT=8080",
            f"{port}_ADDR={address}",
        ]  # fmt: skip
    return links


# Who sends it, what it is, and what the error says of it (None: it runs); HOME is added. The
# programs' reports: kubernetes/kubernetes 84539, kubevirt/containerized-data-importer 4059 and
# kubernetes/ingress-nginx 7968 (services), argoproj/argo-workflows 7586 and 12190 (its whole
# template in a variable) and 15471 (its arguments), tektoncd/pipeline 7513 (all scripts of a task
# in one argument), kubeshop/testkube 5621 (certificates). runc and containerd say of all of them
# "exec /bin/sh: argument list too long", before runc 1.1 "standard_init_linux.go:228: exec user
# process caused: argument list too long", in the container's output, and not what is too long.
LONG = {
    "kubelet, 1,500 services": ({"env": service_links(1500)}, None),
    "kubelet, 5,000 services": (
        {"env": service_links(5000)},
        f"1 arguments and 35002 environment variables have 2340050 bytes {TOGETHER}",
    ),
    "argo, a template as long as it may be": (
        {"env": ["PATH=/bin", "ARGO_TEMPLATE=" + "x" * 131_057]},
        None,
    ),
    "argo, a template of one byte more": (
        {"env": ["PATH=/bin", "ARGO_TEMPLATE=" + "x" * 131_058]},
        f"ARGO_TEMPLATE has 131073 bytes and {ONE_STRING}",
    ),
    "argo, a template that is not ASCII": (
        {"env": ["PATH=/bin", "ARGO_TEMPLATE=" + "\u00e9" * 70_000]},
        f"ARGO_TEMPLATE has 140015 bytes and {ONE_STRING}",
    ),
    "tekton, scripts in an argument": (
        {"args": ["sh", "-c", "x" * 200_000]},
        f"argument 2 has 200001 bytes and {ONE_STRING}",
    ),
    "xargs, many arguments": (
        {"args": ["true", *["x" * 1000] * 8000]},
        f"8001 arguments and 2 environment variables have 8072050 bytes {TOGETHER}",
    ),
}


@pytest.fixture
def box(box: Box) -> Box:
    """Return a box with the stack limit of most nodes."""
    box.process["rlimits"] = [{"type": "RLIMIT_STACK", "soft": 8 << 20, "hard": 8 << 20}]
    return box


@pytest.mark.parametrize("sent", LONG)
def test_the_error_names_a_string_too_long_for_a_container(
    box: Box, sent: str, tmp_path: Path
) -> None:
    """The error names the string that is too long; the kernel's E2BIG does not."""
    change, text = LONG[sent]
    process = {**PROCESS, **change}
    box.process["env"] = process["env"]
    if text is None:
        assert box.outcome(*process["args"]) == (0, "")
        return
    with pytest.raises(InvalidArgument) as caught:
        box.outcome(*process["args"])
    assert (
        str(caught.value) == f'exec "{process["args"][0]}": E2BIG (argument list too long: {text})'
    )


@pytest.mark.parametrize("sent", LONG)
def test_the_error_names_a_string_too_long_for_an_exec(box: Box, sent: str) -> None:
    change, text = LONG[sent]
    with box.running() as (created, request):
        process = merged(request.spec, {**PROCESS, **change})
        exec_request = ExecRequest(
            created.pid, created.pidfd, request.spec, process, cgroup=created.cgroup
        )
        if text is None:
            done = execute(exec_request)
            assert reap(done) == 0
            return
        with pytest.raises(InvalidArgument) as caught:
            execute(exec_request)
        assert (
            str(caught.value) == f'exec "{process.args[0]}": E2BIG (argument list too long: {text})'
        )

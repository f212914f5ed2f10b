"""Tests that every error class and result of doctor has a page, that docs/errors.md is up to date,
and that messages lead to their pages."""

from __future__ import annotations

import ast
import builtins
import re
from pathlib import Path

import pytest
from click.testing import CliRunner

from cri_server.cli.server.explain import explain
from cri_server.explain.model import find
from cri_server.explain.pages import PAGES, markdown, name_of
from cri_server.images.layers.incoming import DigestMismatch
from cri_server.rpc import codes
from pyrunc import errors
from pyrunc.errors import InvalidSpec, KernelError, NotFound, error_of
from tests.support.sources import python_files

ROOT = Path(__file__).parents[3]


def error_classes() -> set[str]:
    """Return the qualified names of all classes below pyrunc.errors.Error, read from the
    sources."""
    bases: dict[str, tuple[str, list[str]]] = {}
    for package in ("pyrunc", "cri_server", "cni_plugins"):
        for path in python_files(ROOT / package):
            if "api" not in path.parts:
                module = ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(
                    ".__init__"
                )
                for node in ast.walk(ast.parse(path.read_text())):
                    if isinstance(node, ast.ClassDef):
                        names = [b.id for b in node.bases if isinstance(b, ast.Name)]
                        bases[f"{module}.{node.name}"] = node.name, names
    classes = {"pyrunc.errors.Error"}
    while True:
        parents = {name.rpartition(".")[2] for name in classes}
        more = {q for q, (_, names) in bases.items() if set(names) & parents} - classes
        if not more:
            return classes
        classes |= more


def test_every_error_class_has_exactly_one_page() -> None:
    classes = [name for page in PAGES for name in page.classes]
    assert sorted(classes) == sorted(error_classes())


def test_every_result_of_doctor_has_a_page() -> None:
    codes_of_results = set()
    for path in (ROOT / "cri_server/doctor").glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if (
                isinstance(node, ast.Call)
                and isinstance(node.func, ast.Name)
                and node.func.id in ("CheckResult", "fine", "note", "warning", "wrong")
            ):
                code = node.args[0]
                codes_of_results |= {code.value} if isinstance(code, ast.Constant) else set()
    assert {page.name for page in PAGES if page.chapter == "doctor"} == codes_of_results


def test_the_document_is_up_to_date() -> None:
    document = (ROOT / "docs/errors.md").read_text()
    assert document == "\n".join(markdown()).rstrip() + "\n", (
        "python -m cri_server.explain.pages > docs/errors.md"
    )


def test_pages_agree_with_the_table_of_codes() -> None:
    for page in PAGES:
        for name in page.classes:
            module, _, cls = name.rpartition(".")
            if module == "pyrunc.errors":
                kind = getattr(errors, cls).kind
                assert page.code == codes.BY_KIND[kind].name, page.name
                assert page.name == kind.replace("_", "-")


def test_names_are_unambiguous_and_texts_complete() -> None:
    names = [word for page in PAGES for word in page.search_names]
    assert len(set(names)) == len(names)
    for page in PAGES:
        assert page.title and page.text.endswith(".") and page.remedy.endswith("."), page.name


@pytest.mark.parametrize(
    ("query", "names"),
    [
        ("wrong-state", ["wrong-state"]),
        ("WrongState", ["wrong-state"]),
        ("wrong_state", ["wrong-state"]),
        ("FailedPrecondition", ["wrong-state"]),
        ("RESOURCE_EXHAUSTED", ["resource-exhausted"]),
        ("UNKNOWN", ["Unknown", "peer"]),
        ("internal", ["internal", "kernel"]),
        ("ENFILE", ["EMFILE"]),
        ("mount 'overlay' on '/': ENODEV (move_mount, plan line 17)", ["ENODEV"]),
        ("RegistryUnavailable: pulling x: the server does not answer", ["registry-unavailable"]),
        ("rpc error: code = NotFound desc = no such container", ["not-found"]),
        ("container c was OOMKilled, then ENOSPC", ["OOMKilled", "ENOSPC"]),
        ("the server is in swap", []),
        ("", []),
    ],
)
def test_find(query: str, names: list[str]) -> None:
    assert [page.name for page in find(PAGES, query)] == names


@pytest.mark.parametrize(
    ("text", "name"),
    [
        (
            (
                "pyrunc-cri: no server at unix:///run/pyrunc/cri.sock: no such file (start one:"
                " pyrunc-cri serve)"
            ),
            "no-server",
        ),
        ("dial unix /run/pyrunc/cri.sock: connect: connection refused", "no-server"),
        (
            "no access to unix:///x: permission denied (only for root and the socket's group)",
            "socket-permission",
        ),
        (
            "CNI ADD failed in portmap: host port 80/tcp is already taken by pods/abc/eth0/12",
            "host-port-taken",
        ),
        ('exec: "pgrep": executable file not found in $PATH', "no-command"),
        (
            (
                "NetworkPluginNotReady message:Network plugin returns error: cni plugin not"
                " initialized"
            ),
            "network-not-ready",
        ),
        ("no IP addresses available in range set: 10.88.0.1-10.88.255.254", "no-address"),
        (
            "certificate verify failed: unable to get local issuer certificate",
            "registry-certificate",
        ),
        ("x509: certificate signed by unknown authority", "registry-certificate"),
        ("http: server gave HTTP response to HTTPS client", "registry-speaks-http"),
        ("toomanyrequests: You have reached your pull rate limit", "registry-limit"),
        ("dial tcp: lookup registry.test: no such host", "name-not-resolved"),
        ("Back-off pulling image: ImagePullBackOff", "pull-backoff"),
        ("CrashLoopBackOff", "crash-loop"),
        ("Failed to create pod sandbox: FailedCreatePodSandBox", "sandbox-failed"),
        ("pull access denied: authentication required", "unauthorized"),
        ("manifest unknown: manifest tagged by x is not found", "no-such-image"),
        ("write /var/lib/pyrunc/x: no space left on device", "ENOSPC"),
        ("exec /app: exec format error", "ENOEXEC"),
        ("rpc error: code = DeadlineExceeded desc = context deadline exceeded", "deadline"),
        ("command terminated with exit code 137", "killed"),
        (
            (
                "container web/c: its pod default/web is stopped; pyrunc-cri start default/web"
                " starts both"
            ),
            "pod-stopped",
        ),
        ("pod default/web exists: 0e2b43fb2e20, ready", "already-exists"),
        ("open /x: permission denied", "EACCES"),
    ],
)
def test_common_messages_lead_to_their_page(text: str, name: str) -> None:
    assert [page.name for page in find(PAGES, text)][:1] == [name]


def test_each_page_has_its_own_remedy() -> None:
    remedies = [page.remedy for page in PAGES]
    assert len(set(remedies)) == len(remedies)


def test_the_name_of_an_error() -> None:
    assert name_of(DigestMismatch("x")) == "digest-mismatch"
    assert name_of(error_of(NotFound("x").to_fields())) == "not-found"
    assert (
        name_of(InvalidSpec("a", "b")) == "invalid-spec"
        and name_of(KernelError("open", "x", 2)) == "kernel"
    )
    assert name_of(builtins.ZeroDivisionError()) == "internal"


def test_the_explain_command_prints_pages() -> None:
    run = CliRunner().invoke
    assert "Resource" not in run(explain, []).output and "wrong-state" in run(explain, []).output
    page = run(explain, ["mount", "'x'", "ENOSPC"])
    assert page.output.startswith("ENOSPC: No space left\n") and "pyrunc-cri gc" in page.output
    unknown = run(explain, ["nonsense"])
    assert isinstance(unknown.exception, NotFound) and "'nonsense'" in str(unknown.exception)


def test_no_line_breaks_within_a_command() -> None:
    run = CliRunner()
    for page in PAGES:
        output = run.invoke(explain, [page.name]).output
        for command in re.findall("`[^`]*`", f"{page.text} {page.remedy}"):
            assert " ".join(command.split()) in output, page.name

"""Tests `pyrunc-cri doctor` on this machine and beside a real server: its results and exit code,
the leftovers that it reports, and that it leaves nothing behind."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

from tests.cri.client_verbs import PROGRAM
from tests.cri.server_harness import REPOSITORY, Server, server_fixture
from tests.support.processes import wait_until

server = server_fixture("module")


def configuration(server: Server, **cgroup: str) -> Path:
    """Write a configuration file with the settings that the tests pass to the server as flags;
    return its path."""
    tables: dict[str, dict[str, Any]] = {
        "server": {
            "listen": f"unix://{server.socket}",
            "root": str(server.root),
            "state": str(server.state),
        },
        "network": {
            "conf_dir": str(server.folder / "net.d"),
            "bin_dir": str(server.folder / "bin"),
            "netns_dir": str(server.names),
        },
        "cgroup": {
            "driver": "cgroupfs",
            "missing_controllers": "warn",
            "default_parent": f"/{server.folder.name}",
            **cgroup,
        },
    }
    lines = []
    for table, values in tables.items():
        lines += [f"[{table}]", *(f"{key} = {json.dumps(value)}" for key, value in values.items())]
    path = server.folder / "doctor.toml"
    path.write_text("\n".join(lines))
    return path


def run(config: Path, *arguments: str) -> tuple[int, str]:
    command = [*PROGRAM, "doctor", "--config", str(config), *arguments]
    done = subprocess.run(command, capture_output=True, cwd=REPOSITORY, timeout=60)
    assert not done.stderr, done.stderr
    return done.returncode, done.stdout.decode()


def doctor(config: Path) -> dict[str, dict[str, str]]:
    """Run `pyrunc-cri doctor`; return a dict: code -> result."""
    code, text = run(config, "--json")
    results = json.loads(text)
    assert code == any(f["level"] == "wrong" for f in results)
    return {f["code"]: f for f in results}


def names(folder: Path) -> list[str]:
    """Return the names of all files except the timeline, which the server may write at any
    moment."""
    return sorted(set(os.listdir(folder)) - {"timeline"})


def test_doctor_checks_a_running_server(server: Server) -> None:
    pod = server.run_pod()
    server.launch(pod)
    before = names(server.root)
    results = doctor(configuration(server))
    assert names(server.root) == before
    for code in (
        "server",
        "overlay-on-root",
        "cni-config",
        "cni-plugins",
        "firewall",
        "kernel-calls",
        "addresses",
        "nft",
    ):
        assert results[code]["level"] == "fine", results[code]
    left = (
        "leftover-shims",
        "leftover-mounts",
        "leftover-names",
        "leftover-groups",
        "damaged-records",
    )
    for code in left:
        assert results[code]["level"] == "fine", results[code]
    assert "pods of " in results["cni-config"]["found"] and results["addresses"][
        "found"
    ].startswith("1 of 65534 IPv4")
    server.remove_pod(pod)


def test_doctor_checks_the_server_of_the_address(server: Server) -> None:
    """With `--address`, doctor checks the folders of the server at that address."""

    def results(address: str) -> dict[str, dict[str, str]]:
        command = [*PROGRAM, "--address", address, "doctor", "--json"]
        done = subprocess.run(command, capture_output=True, text=True, cwd=REPOSITORY)
        return {each["code"]: each for each in json.loads(done.stdout)}

    by_code = results(f"unix://{server.socket}")
    assert by_code["server"]["found"] == f"answers at {server.socket}"
    assert by_code["cni-config"]["level"] == "fine", "of the server's own folder"
    assert by_code["root-space"]["found"].startswith(str(server.root)) or str(server.root) in str(
        by_code
    )
    absent = results(f"unix://{server.folder}/absent.sock")["server"]
    # Without systemd, the remedy does not name systemctl.
    start = (
        "systemctl start pyrunc-cri"
        if Path("/run/systemd/system").is_dir()
        else (
            f"pyrunc-cri serve --listen unix://{server.folder}/absent.sock (systemd does not run"
            " here)"
        )
    )
    assert absent["mend"] == start


def test_doctor_checks_the_folder_of_names(server: Server) -> None:
    server.remove_pod(server.run_pod())
    (server.names / ("0" * 64)).touch()
    (server.names / "cni-of-containerd").touch()
    try:
        results = doctor(configuration(server))
        assert (
            results["leftover-names"]["level"] == "note"
            and "1 names" in results["leftover-names"]["found"]
        )
        assert f"umount -l {server.names}/000" in results["leftover-names"]["mend"]
        for name in server.names.iterdir():
            name.unlink()
        subprocess.run(["mount", "-t", "tmpfs", "names", server.names], check=True)
        try:
            for how, level in (("private", "note"), ("shared", "fine")):
                subprocess.run(["mount", f"--make-{how}", server.names], check=True)
                assert doctor(configuration(server))["netns-dir"]["level"] == level
        finally:
            subprocess.run(["umount", server.names], check=True)
    finally:
        for name in server.names.iterdir():
            name.unlink()


def test_the_text_of_doctor_lists_results(server: Server) -> None:
    config = configuration(server)
    (server.folder / "net.d" / "10-pods.conflist").rename(server.folder / "kept")
    try:
        code, text = run(config)
    finally:
        (server.folder / "kept").rename(server.folder / "net.d" / "10-pods.conflist")
    assert code == 1
    assert (
        "WRONG    cni-config: no network configuration (*.conflist, *.conf, *.json) in"
        f" {server.folder}/net.d\n" in text
    )
    assert (
        "           so: the node is NetworkReady=false" in text
        and "           mend: install" in text
    )
    assert "\nok " not in text and "overlay-on-root" not in text
    # Also a kubelet of another test on this machine, which uses another socket, is WRONG.
    wrong = sum(line.startswith("WRONG ") for line in text.splitlines())
    assert f"{wrong} wrong" in text.splitlines()[-1]
    assert "ok       overlay-on-root: works on " in run(config, "--all")[1]


def test_doctor_detects_an_unusable_root(server: Server, tmp_path: Path) -> None:
    config = configuration(server)
    config.write_text(config.read_text().replace(str(server.root), "/proc"))
    results = doctor(config)
    assert results["overlay-on-root"]["level"] == "wrong" and results["overlay-on-root"]["mend"]


def test_doctor_finds_pods_without_a_server_or_a_record() -> None:
    with Server(network=False) as server:
        pod = server.run_pod(host_network=True)
        server.kill()
        config = configuration(server)
        try:
            results = doctor(config)
            assert (
                results["server"]["level"] == "warning"
                and "1 pods run on" in results["server"]["follows"]
            )
            assert results["leftover-shims"]["level"] == "fine"
            record = server.root / "sandboxes" / f"{pod}.json"
            record.rename(record.with_suffix(".damaged"))
            results = doctor(config)
            assert (
                results["leftover-shims"]["level"] == "warning"
                and pod[:12] in results["leftover-shims"]["found"]
            )
            assert results["damaged-records"]["level"] == "note"
        finally:
            server.start()
        assert wait_until(lambda: doctor(config)["leftover-shims"]["level"] == "fine", 30)
        (server.root / "sandboxes" / f"{pod}.damaged").unlink()


def test_doctor_finds_leftover_mounts_and_cgroups() -> None:
    with Server(network=False) as server:
        config = configuration(server)
        place = server.root / "forgotten"
        place.mkdir()
        top = next(
            p
            for p in (Path("/sys/fs/cgroup"), Path("/sys/fs/cgroup/unified"))
            if (p / "cgroup.procs").exists()
        )
        group = top / server.folder.name / ("0" * 64)
        subprocess.run(["mount", "-t", "tmpfs", "forgotten", place], check=True)
        group.mkdir(parents=True)
        try:
            results = doctor(config)
            assert (
                results["leftover-mounts"]["level"] == "warning"
                and str(place) in results["leftover-mounts"]["mend"]
            )
            assert (
                results["leftover-groups"]["level"] == "note"
                and results["leftover-groups"]["mend"] == f"rmdir {group}"
            )
            with subprocess.Popen(["sleep", "60"]) as process:
                (group / "cgroup.procs").write_text(str(process.pid))
                living = doctor(config)["leftover-groups"]
                subprocess.run(["sh", "-c", living["mend"].partition("them: ")[2]], check=True)
                assert living["level"] == "warning" and process.wait(30) == -9
        finally:
            subprocess.run(["umount", place], check=True)
            wait_until(lambda: "populated 0" in (group / "cgroup.events").read_text(), 30)
            group.rmdir()
            place.rmdir()


def test_a_starting_server_logs_problems(server: Server) -> None:
    """A server without a network configuration logs the doctor's result with its remedy."""
    with Server(network=False) as other:
        assert wait_until(lambda: "cni-config: no network configuration" in other.tail(100), 30)
        (line,) = [line for line in other.tail(100).splitlines() if "cni-config" in line]
        assert " WARNING cri_server.doctor.startup: " in line and "network add-on" in line
    assert "overlay-on-root" not in server.tail(1000) and "cni-config" not in server.tail(1000)

"""Tests `pyrunc-cri install-node` on a folder that stands for the root of a machine."""

from __future__ import annotations

import fcntl
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from cni_plugins.net import host_rules
from cni_plugins.protocol import builtin
from cri_server.config import Config
from cri_server.install import config_file, node
from pyrunc.abi.clone import CLONE_NEWNS
from pyrunc.abi.mount import MS_BIND, MS_PRIVATE, MS_REC
from pyrunc.keeper.client import ensure
from pyrunc.kernel import mount, namespace
from tests.support.keeper import is_gone
from tests.support.tree import listing

PROGRAM = Path(sys.executable).parent / "pyrunc-cri"
KUBEADM = """\
[Service]
Environment="KUBELET_CONFIG_ARGS=--config=/var/lib/kubelet/config.yaml"
EnvironmentFile=-/var/lib/kubelet/kubeadm-flags.env
ExecStart=
ExecStart=/usr/bin/kubelet $KUBELET_CONFIG_ARGS \\
  $KUBELET_KUBEADM_ARGS $KUBELET_EXTRA_ARGS
"""


@pytest.fixture
def root(tmp_path: Path) -> Path:
    machine = tmp_path / "machine"
    for folder in (
        "etc/systemd/system",
        "usr/lib/systemd/system/kubelet.service.d",
        "usr/local/bin",
        "var/lib",
        "opt",
    ):
        (machine / folder).mkdir(parents=True)
    return machine


def run(root: Path, *words: str, code: int = 0) -> str:
    done = subprocess.run(
        [PROGRAM, "install-node", "--root", root, *words],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == code, done
    return done.stdout + done.stderr


def test_uninstall_removes_all_installed_files_and_folders(root: Path) -> None:
    before = listing(root)
    run(root)
    assert len(listing(root)) > len(before) + 30
    run(root, "--uninstall")
    assert listing(root) == before


def test_a_second_install_changes_nothing(root: Path) -> None:
    run(root)
    first = listing(root)
    assert run(root) == "nothing to do\n"
    assert listing(root) == first
    (root / "etc/sysctl.d/50-pyrunc.conf").unlink()
    assert run(root).splitlines()[0] == "write /etc/sysctl.d/50-pyrunc.conf"
    assert listing(root) == first
    run(root, "--uninstall")
    assert run(root, "--uninstall") == "nothing to do\n"


def test_a_dry_run_lists_the_changes_and_makes_none(root: Path) -> None:
    before = listing(root)
    announced = [
        line.removeprefix("would ")
        for line in run(root, "--dry-run").splitlines()
        if line.startswith("would ")
    ]
    assert listing(root) == before
    assert [
        line for line in run(root).splitlines() if "systemd does not run" not in line
    ] == announced
    installed = listing(root)
    run(root, "--uninstall", "--dry-run")
    assert listing(root) == installed


def test_the_installed_files_have_their_content(root: Path) -> None:
    run(root)
    unit = (root / "etc/systemd/system/pyrunc-cri.service").read_text()
    assert f"ExecStart={PROGRAM} serve\n" in unit and "KillMode=process" in unit
    assert (root / "etc/pyrunc/config.toml").read_text() == config_file.text()
    assert (root / "usr/local/bin/pyrunc").readlink() == PROGRAM.with_name("pyrunc")
    for name in builtin.MODULES:
        plugin = root / "opt/cni/bin" / name
        assert (
            builtin.is_builtin_script(plugin.read_bytes())
            and plugin.stat().st_mode & 0o777 == 0o755
        )
    done = subprocess.run(
        [root / "opt/cni/bin/loopback"],
        env={"CNI_COMMAND": "VERSION"},
        capture_output=True,
        check=True,
    )
    assert b"supportedVersions" in done.stdout


def test_plugins_of_others_stay(root: Path) -> None:
    bridge, dangling = root / "opt/cni/bin/bridge", root / "opt/cni/bin/portmap"
    bridge.parent.mkdir(parents=True)
    bridge.write_bytes(b"\x7fELF another's")
    dangling.symlink_to("/elsewhere/portmap")
    before = listing(root)
    assert "keep /opt/cni/bin/bridge: it belongs to another program" in run(root)
    assert listing(root).items() >= before.items()
    run(root, "--uninstall")
    assert listing(root) == before


def test_a_plugin_that_another_package_has_replaced_stays(root: Path) -> None:
    run(root)
    (root / "opt/cni/bin/bridge").write_bytes(b"\x7fELF another's")
    assert "keep /opt/cni/bin/bridge: it belongs to another program" in run(root, "--uninstall")
    assert (root / "opt/cni/bin/bridge").exists() and not (root / "opt/cni/bin/portmap").exists()


def test_a_changed_configuration_stays_until_a_purge(root: Path) -> None:
    run(root)
    file = root / "etc/pyrunc/config.toml"
    file.write_text('[server]\nlog_level = "debug"\n')
    assert "keep /etc/pyrunc/config.toml: it exists" in run(root)
    assert "keep /etc/pyrunc/config.toml: it was changed after the installation" in run(
        root, "--uninstall"
    )
    assert file.read_text() == '[server]\nlog_level = "debug"\n'


def test_purge_takes_images_records_and_a_changed_configuration(root: Path) -> None:
    before = listing(root)
    run(root)
    (root / "etc/pyrunc/config.toml").write_text("[server]\n")
    (root / "var/lib/pyrunc/images/blobs").mkdir(parents=True)
    (root / "var/lib/pyrunc/images/blobs/x").write_text("x")
    run(root, "--uninstall", "--purge")
    assert listing(root) == before


def test_the_table_that_a_purge_removes_is_that_of_our_plugins() -> None:
    script = (Path(__file__).parents[2] / "debian/postrm").read_text()
    assert node.FIREWALL == host_rules.TABLE
    assert f"nft delete table inet {host_rules.TABLE} " in script and f" {node.FILTERS}\n" in script
    names = Path(Config().network.netns_dir)
    assert names == Path("/var/run/netns") and " /run/netns " in script, (
        "the empty folder of names is removed, too"
    )


def test_the_keeper_is_ended(root: Path) -> None:
    run(root)
    state = root / "run/pyrunc-cri"
    state.mkdir(parents=True)
    keeper = ensure(state)
    pid = keeper.hello()
    keeper.put("pod/left", b"")
    keeper.close()
    assert "end pyrunc-keeper of /run/pyrunc-cri" in run(root, "--uninstall")
    assert is_gone(pid)


def test_uninstall_is_refused_while_there_are_pods(root: Path) -> None:
    run(root)
    (root / f"run/pyrunc-cri/sandboxes/{64 * 'a'}").mkdir(parents=True)
    installed = listing(root)
    assert "1 pod of this boot: stop kubelet" in run(root, "--uninstall", "--purge", code=1)
    assert listing(root) == installed


@pytest.mark.parametrize("folder", ["var/lib/pyrunc", "run/pyrunc-cri"])
def test_uninstall_is_refused_while_a_server_runs(root: Path, folder: str) -> None:
    run(root)
    (root / folder).mkdir(parents=True, exist_ok=True)
    installed = listing(root)
    with open(root / folder / "server.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        message = (
            f"/{folder} is in use by a server that systemd did not start:"
            " stop `pyrunc-cri serve` first"
        )
        assert message in run(root, "--uninstall", "--purge", code=1)
    (root / folder / "server.lock").unlink()
    assert listing(root) == installed
    run(root, "--uninstall", "--purge")
    assert not (root / "var/lib/pyrunc").exists()


@pytest.fixture
def own_mounts() -> Iterator[None]:
    """Put this thread into a new mount namespace, which its children inherit."""
    own = namespace.open_own("mnt")
    folder = os.open(".", os.O_PATH | os.O_DIRECTORY)
    namespace.unshare(CLONE_NEWNS)
    try:
        mount.mount(None, "/", None, MS_REC | MS_PRIVATE)
        yield
    finally:
        namespace.setns(own, CLONE_NEWNS)
        os.fchdir(folder)
        os.close(folder)
        os.close(own)


@pytest.mark.usefixtures("own_mounts")
def test_a_purge_empties_a_disk_that_is_mounted_there(root: Path) -> None:
    data = root / "var/lib/pyrunc"
    data.mkdir()
    mount.mount("disk", data, "tmpfs")
    (data / "lost+found").mkdir()
    run(root)
    (data / "images").mkdir()
    (data / "images/x").touch()
    (data / "link").symlink_to(root / "etc")
    run(root, "--uninstall", "--purge")
    assert [path.name for path in data.iterdir()] == ["lost+found"] and (root / "etc").exists()
    run(root, "--uninstall", "--purge")


@pytest.mark.usefixtures("own_mounts")
def test_a_purge_deletes_nothing_below_a_mount(root: Path, tmp_path: Path) -> None:
    run(root)
    (tmp_path / "home").mkdir()
    (tmp_path / "home/file").write_text("canary")
    place = root / "var/lib/pyrunc/images"
    place.mkdir()
    mount.mount(tmp_path / "home", place, None, MS_BIND)
    message = f"{place} is a mount point: umount it first"
    assert message in run(root, "--uninstall", "--purge", code=1)
    assert (place / "file").read_text() == "canary" and (root / "etc/pyrunc/config.toml").exists()
    run(root, "--uninstall")


class TestKubelet:
    DROP_IN = "etc/systemd/system/kubelet.service.d/90-pyrunc.conf"

    @staticmethod
    def unit(root: Path, start: str = "/usr/bin/kubelet") -> None:
        (root / "usr/lib/systemd/system/kubelet.service").write_text(
            f"[Unit]\nAfter=x\n\n[Service]\nExecStart={start}\n"
        )

    def test_a_node_without_kubelet_gets_no_drop_in(self, root: Path) -> None:
        run(root)
        assert not (root / self.DROP_IN).exists()

    def test_the_endpoint_ends_the_command_line_of_its_unit(self, root: Path) -> None:
        self.unit(
            root, "/opt/kubelet --container-runtime-endpoint=unix:///run/containerd/containerd.sock"
        )
        run(root)
        assert (
            (root / self.DROP_IN)
            .read_text()
            .endswith(
                "[Service]\nExecStart=\nExecStart=/opt/kubelet"
                " --container-runtime-endpoint=unix:///run/containerd/containerd.sock"
                " --container-runtime-endpoint=unix:///run/pyrunc/cri.sock\n"
            )
        )

    def test_the_command_line_of_kubeadms_drop_in_is_used(self, root: Path) -> None:
        self.unit(root)
        (root / "usr/lib/systemd/system/kubelet.service.d/10-kubeadm.conf").write_text(KUBEADM)
        run(root)
        assert (
            "ExecStart=/usr/bin/kubelet $KUBELET_CONFIG_ARGS $KUBELET_KUBEADM_ARGS"
            " $KUBELET_EXTRA_ARGS --container-runtime-endpoint=unix:///run/pyrunc/cri.sock\n"
            in (root / self.DROP_IN).read_text()
        )
        assert run(root) == "nothing to do\n", "our drop-in is not taken for kubelet's"

    def test_a_unit_that_is_not_utf8_is_named(self, root: Path) -> None:
        self.unit(root)
        unit = root / "etc/systemd/system/kubelet.service"
        unit.write_bytes(b"[Service]\nExecStart=/usr/bin/kubelet --node-ip=\xff\n")
        refused = run(root, code=1)
        assert f"{unit}: not UTF-8" in refused
        assert not (root / self.DROP_IN).exists()

    def test_an_administrators_unit_comes_before_a_packages(self, root: Path) -> None:
        self.unit(root)
        (root / "etc/systemd/system/kubelet.service").write_text(
            "[Service]\nExecStart=/usr/local/bin/kubelet\n"
        )
        run(root)
        assert "ExecStart=/usr/local/bin/kubelet --" in (root / self.DROP_IN).read_text()

    def test_no_kubelet_leaves_kubelets_flags(self, root: Path) -> None:
        self.unit(root)
        run(root, "--no-kubelet")
        assert not (root / self.DROP_IN).exists()

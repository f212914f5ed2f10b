"""Runs a Debian guest with systemd and pure cgroup v2 under QEMU, for checks that a hybrid host
cannot make: limits read back from the kernel's files.

`python -m tests.support.guest build|start|ssh COMMAND…|stop` (`make vm`).

The disk is built once into the cache folder, with the project's dependencies already installed in
/opt/venv; every boot works on a snapshot of it, so the disk stays as built. The guest's network has
only forwarded ports, ssh's among them, and, with a `Link`, another guest. KVM is used only after a
trial boot of this kernel has succeeded.

GUEST_SUITE (trixie), GUEST_ARCHITECTURE (amd64) and GUEST_PORT (2222) choose the guest of the
commands above: its suite, its architecture and its port for ssh.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import io
import os
import platform
import secrets
import shutil
import socket
import subprocess
import sys
import tarfile
import tempfile
import time
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.support import session, toolchain
from tests.support.processes import Program, wait_until

PROJECT = Path(__file__).parents[2]
PACKAGES = (
    "systemd",
    "systemd-sysv",
    "dbus",
    "udev",
    "kmod",
    "iproute2",
    "nftables",
    "iptables",
    "conntrack",
    "procps",
    "openssl",
    "python3",
    "python3-venv",
    "python3-dev",
    "gcc",
    "libc6-dev",
    "libseccomp2",
    "ca-certificates",
    "busybox-static",
    "openssh-server",
    "e2fsprogs",
    "apparmor",
    "stress-ng",
    "strace",
    "podman",
    "crun",
    "conmon",
    "criu",
    "uidmap",
    "passt",
    "catatonit",
    "libpam-systemd",
    "dbus-user-session",
)
# What the kernel needs to reach its root disk and its network card, in the order of insmod.
INITRD_MODULES = (
    "drivers/virtio/virtio_ring",
    "drivers/virtio/virtio",
    "drivers/virtio/virtio_pci_legacy_dev",
    "drivers/virtio/virtio_pci_modern_dev",
    "drivers/virtio/virtio_pci",
    "drivers/block/virtio_blk",
    "net/core/failover",
    "drivers/net/net_failover",
    "drivers/net/virtio_net",
)
INIT = """#!/bin/sh
mount -t proc p /proc; mount -t sysfs s /sys; mount -t devtmpfs d /dev
for m in MODULES; do insmod /mod/$m; done
echo initrd-is-up
i=0; while [ ! -b /dev/vda ] && [ $i -lt 100 ]; do sleep 0.1; i=$((i+1)); done
# A procfs below the new root would let user namespaces mount one without masks \
(mount_too_revealing in fs/namespace.c).
mount -t ext4 /dev/vda /mnt && mount --move /dev /mnt/dev && umount /sys && umount /proc \
&& exec switch_root /mnt /sbin/init
echo no-root-disk; sleep 1000
"""
SERVICES = "10.0.2.100"
UNWANTED = (
    "apt-daily.timer",
    "apt-daily-upgrade.timer",
    "dpkg-db-backup.timer",
    "e2scrub_all.timer",
    "fstrim.timer",
)


def dependencies() -> list[str]:
    """Return the requirements in pyproject.toml for running and testing the project."""
    project = tomllib.loads((PROJECT / "pyproject.toml").read_text())["project"]
    return [
        *project["dependencies"],
        *(r for r in project["optional-dependencies"]["test"] if r.startswith("pytest")),
    ]


@dataclass(frozen=True)
class Architecture:
    """The processors of a guest: Debian's and Python's names for them, elf(5)'s number, QEMU's
    machine, console and accelerator."""

    debian: str
    python: str
    elf: int
    machine: tuple[str, ...]
    console: str
    accelerator: str

    @property
    def qemu(self) -> str:
        """Return the path of QEMU's program."""
        return f"qemu-system-{self.python}"

    @property
    def is_native(self) -> bool:
        """Return whether programs of the guest run on this machine."""
        return self.python == platform.machine()


# x86: both processors in one thread. With a thread each, QEMU 7.2 (Debian 12) let the guest's
# kernel crash or hang now and then.
AMD64 = Architecture(
    "amd64", "x86_64", 62, ("-M", "q35", "-cpu", "max"), "ttyS0", "tcg,thread=single"
)
# A thread each is safe where a weakly ordered processor is emulated on a strongly ordered one.
ARM64 = Architecture(
    "arm64",
    "aarch64",
    183,
    ("-M", "virt,gic-version=3", "-cpu", "max,pauth-impdef=on"),
    "ttyAMA0",
    "tcg,thread=multi,tb-size=1024",
)


@dataclass(frozen=True)
class Variant:
    """Differences of a guest from the default one: packages, words of the kernel's command line, an
    architecture."""

    packages: tuple[str, ...] = ()
    arguments: str = ""
    architecture: Architecture = AMD64

    def all_packages(self, architecture: Architecture) -> list[str]:
        """Return the packages of the disk, with their names on that architecture."""
        return [f"linux-image-cloud-{architecture.debian}", *PACKAGES, *self.packages]


PLAIN = Variant()
# Labels are set and decisions are noted, nothing is refused: the disk's files have no labels.
SELINUX = Variant(
    ("selinux-basics", "selinux-policy-default", "policycoreutils", "selinux-utils"),
    "selinux=1 security=selinux enforcing=0",
)

EMULATED_ARM64 = Variant(architecture=ARM64)


def disk_folder(suite: str, variant: Variant = PLAIN) -> Path:
    """Return the cache folder of the disk, whose name depends on the disk's packages and recipe."""
    packages = variant.all_packages(variant.architecture)
    steps = "5" if variant.architecture.is_native else "5, unpacked over the native one"
    recipe = "\n".join([*packages, *dependencies(), *INITRD_MODULES, INIT, steps])
    return toolchain.cache() / "vm" / f"{suite}-{hashlib.sha256(recipe.encode()).hexdigest()[:12]}"


def build_bookworm() -> Path:
    """Return the folder of the disk with Debian 12."""
    return build("bookworm")


def build_selinux() -> Path:
    """Return the folder of the disk with SELinux' policy."""
    return build(variant=SELINUX)


def build_arm64() -> Path:
    """Return the folder of the disk for arm64."""
    return build(variant=EMULATED_ARM64)


def build(suite: str = "trixie", variant: Variant = PLAIN) -> Path:
    """Make the guest's disk, kernel and initrd unless they exist; return their folder."""
    folder = disk_folder(suite, variant)
    folder.parent.mkdir(parents=True, exist_ok=True)
    with open(
        folder.with_suffix(".lock"), "w"
    ) as lock:  # two builders would change each other's disk and key
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (folder / "disk.img").exists():
            _build(folder, suite, variant)
    return folder


def _build(folder: Path, suite: str, variant: Variant) -> None:
    work = folder.with_suffix(f".{os.getpid()}")
    work.mkdir(parents=True)
    try:
        root = work / "root"
        _bootstrap(root, suite, variant)
        _install_dependencies(root, variant.architecture)
        if not variant.architecture.is_native:
            _change_architecture(root, suite, variant, work / "foreign")
        _configure(root, work)
        _initrd(root, work)
        _disk(root, work)
        shutil.rmtree(folder, ignore_errors=True)
        work.rename(folder)
    finally:
        shutil.rmtree(work, ignore_errors=True)


def _bootstrap(root: Path, suite: str, variant: Variant) -> None:
    """Make the guest's system with this machine's architecture."""
    packages = ",".join(variant.all_packages(AMD64))
    # So the packages' scripts run at this machine's speed.
    _run(
        "mmdebstrap",
        "--quiet",
        "--mode=root",
        "--variant=minbase",
        f"--include={packages}",
        suite,
        str(root),
    )


def _change_architecture(root: Path, suite: str, variant: Variant, unpacked: Path) -> None:
    """Replace the packages' files in `root` by those of the same packages for another architecture.
    No package can be installed in such a guest: dpkg's records stay those of this machine's
    architecture."""
    architecture = variant.architecture
    # The packages' scripts have the same results (users, units, alternatives, bytecode) on all
    # architectures, and would take half an hour in an emulator.
    packages = ["?essential", "~prequired", *variant.all_packages(architecture)]
    options = ["--quiet", "--mode=root", "--variant=extract", f"--arch={architecture.debian}"]
    _run("mmdebstrap", *options, *(f"--include={name}" for name in packages), suite, str(unpacked))
    modules = root / "usr/lib/modules"
    shutil.rmtree(modules)
    shutil.move(unpacked / "usr/lib/modules", modules)
    _run("chroot", str(root), "depmod", next(modules.iterdir()).name)
    for path in (
        root / f"usr/lib/{AMD64.python}-linux-gnu",
        root / "boot",
        root / "etc/ld.so.cache",
    ):
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    copy = (
        'tar -C "$0" --exclude=./var/lib/dpkg --exclude=./dev -cf - . | tar -C "$1"'
        " --keep-directory-symlink -xpf -"
    )
    _run("sh", "-c", copy, str(unpacked), str(root))
    shutil.rmtree(unpacked)
    for path in (root / "usr/bin").iterdir():
        # a file that the other architecture's packages lack, such as pasta.avx2
        if _is_of(path, AMD64):
            path.unlink()
    if not _is_of(root / "usr/bin/bash", architecture):
        raise RuntimeError(
            f"mmdebstrap has unpacked no bash for {architecture.debian}: no essential packages"
        )


def _is_of(path: Path, architecture: Architecture) -> bool:
    """Return whether the file is a program for that architecture (e_machine of elf(5)); False for a
    link."""
    if path.is_symlink() or not path.is_file():
        return False
    with path.open("rb") as file:
        head = file.read(20)
    return head[:4] == b"\x7fELF" and head[18] == architecture.elf


def _install_dependencies(root: Path, architecture: Architecture) -> None:
    """Install the project's dependencies for the guest's interpreter, with this machine's pip."""
    python = next((root / "usr/lib").glob("python3.*"))
    version = python.name.removeprefix("python")
    _run("chroot", str(root), "python3", "-m", "venv", "/opt/venv")
    site = root / "opt/venv/lib" / python.name / "site-packages"
    with tempfile.TemporaryDirectory() as folder:
        wheels = Path(folder)
        download_wheels(wheels, version, dependencies(), architecture)
        # An emulated pip would need minutes.
        pip = [
            sys.executable,
            "-m",
            "pip",
            "install",
            "-q",
            "--disable-pip-version-check",
            "--root-user-action=ignore",
        ]
        options = [
            "--no-index",
            "--no-deps",
            "--no-compile",
            "--implementation=cp",
            f"--target={site}",
        ]
        _run(*pip, *options, *_platforms(version, architecture), *map(str, wheels.glob("*.whl")))
    (site / "project.pth").write_text("/root/project\n")


def _platforms(version: str, architecture: Architecture) -> list[str]:
    """Return pip's options for wheels that fit Python `version` on a machine of that
    architecture."""
    names = [f"manylinux_2_{minor}" for minor in (17, 24, 26, 28, 34)] + ["manylinux2014"]
    platforms = [f"--platform={name}_{architecture.python}" for name in names]
    return ["--only-binary=:all:", f"--python-version={version}", *platforms]


def download_wheels(
    folder: Path, version: str, names: Sequence[str], architecture: Architecture = AMD64
) -> None:
    """Download wheels of `names` and of their dependencies, for Python `version` on a machine of
    that architecture."""
    pip = [
        sys.executable,
        "-m",
        "pip",
        "download",
        "-q",
        "--disable-pip-version-check",
        "-d",
        str(folder),
    ]
    _run(*pip, *_platforms(version, architecture), *names)


def _configure(root: Path, work: Path) -> None:
    _run("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(work / "key"))
    (root / "root/.ssh").mkdir(mode=0o700, exist_ok=True)
    shutil.copy(work / "key.pub", root / "root/.ssh/authorized_keys")
    (root / "etc/hostname").write_text("guest\n")
    (root / "etc/hosts").write_text("127.0.0.1 localhost guest\n")
    (root / "etc/systemd/network/10-eth.network").write_text(
        "[Match]\nName=eth0\n[Network]\nAddress=10.0.2.15/24\nGateway=10.0.2.2\n"
    )
    units = root / "etc/systemd/system"
    (units / "multi-user.target.wants").mkdir(parents=True, exist_ok=True)
    (units / "multi-user.target.wants/systemd-networkd.service").symlink_to(
        "/lib/systemd/system/systemd-networkd.service"
    )
    for unit in UNWANTED:
        (units / unit).unlink(missing_ok=True)
        (units / unit).symlink_to("/dev/null")
    (root / "etc/fstab").write_text("/dev/vda / ext4 defaults 0 0\n")
    (root / "etc/modules-load.d/node.conf").write_text(
        "overlay\nbr_netfilter\nnf_conntrack\nveth\nbridge\n"
    )
    (root / "etc/sysctl.d/node.conf").write_text("net.ipv4.ip_forward=1\n")


def _initrd(root: Path, work: Path) -> None:
    kernel = next((root / "boot").glob("vmlinuz-*"))
    shutil.copy(kernel, work / "vmlinuz")
    modules = root / "lib/modules" / kernel.name.removeprefix("vmlinuz-") / "kernel"
    initrd = work / "initrd"
    for folder in ("bin", "dev", "proc", "sys", "mnt", "mod"):
        (initrd / folder).mkdir(parents=True)
    shutil.copy(root / "usr/bin/busybox", initrd / "bin/busybox")
    for applet in ("sh", "insmod", "mount", "umount", "switch_root", "sleep"):
        (initrd / "bin" / applet).symlink_to("busybox")
    names = []
    for module in INITRD_MODULES:
        plain, packed = modules / f"{module}.ko", modules / f"{module}.ko.xz"
        target = initrd / "mod" / plain.name
        if packed.exists():
            target.write_bytes(
                subprocess.run(["xz", "-dc", str(packed)], capture_output=True, check=True).stdout
            )
        elif plain.exists():
            shutil.copy(plain, target)
        else:
            continue  # built into this kernel
        names.append(plain.name)
    (initrd / "init").write_text(INIT.replace("MODULES", " ".join(names)))
    (initrd / "init").chmod(0o755)
    archive = subprocess.run(
        "find . | busybox cpio -o -H newc | gzip -1",
        shell=True,
        cwd=initrd,
        capture_output=True,
        check=True,
    ).stdout
    (work / "initrd.gz").write_bytes(archive)
    shutil.rmtree(initrd)


def _disk(root: Path, work: Path) -> None:
    disk = work / "disk.img"
    with open(disk, "wb") as file:
        file.truncate(12 << 30)
    _run("mke2fs", "-q", "-t", "ext4", "-d", str(root), str(disk))
    shutil.rmtree(root)


@dataclass(frozen=True)
class Link:
    """A cable between the second network cards (eth1) of two guests, each with a unix socket: `own`
    and `other`."""

    own: Path
    other: Path
    hardware_address: str

    def options(self) -> list[str]:
        """Return QEMU's options for the second network card."""
        # Datagrams need no connection: the guests can start in any order.
        ends = f"local.type=unix,local.path={self.own},remote.type=unix,remote.path={self.other}"
        return [
            "-netdev",
            f"dgram,id=n1,{ends}",
            "-device",
            f"virtio-net-pci,netdev=n1,mac={self.hardware_address}",
        ]


class Guest:
    """A guest that boots from its disk. Use as a context manager, or call `start` and `stop`."""

    def __init__(
        self,
        suite: str = "trixie",
        *,
        port: int = 0,
        memory_mib: int = 4096,
        disks: Sequence[Path] = (),
        link: Link | None = None,
        forward: Mapping[int, int] | None = None,
        services: Mapping[int, int] | None = None,
        variant: Variant = PLAIN,
    ) -> None:
        """Take the settings of a guest.

        - `port`: the port of 127.0.0.1 for the guest's ssh; 0: a free one.
        - `disks`: read-only disks, /dev/vdb, /dev/vdc and so on in the guest.
        - `forward`: the guest's port for each port of 127.0.0.1 here.
        - `services`: the port of 127.0.0.1 here for each port of the address SERVICES in the guest.
        """
        self.disk = build(suite, variant)
        self.port = port or free_port()
        self.memory_mib = memory_mib
        self.disks = tuple(disks)
        self._link, self._forward = link, {**(forward or {}), self.port: 22}
        self._services, self._variant = dict(services or {}), variant
        self.program = Program(f"guest-{self.port}", toolchain.cache() / "vm" / "run")
        self.accelerator = ""
        self._connection: Path | None = None

    def start(self, timeout_s: float = 600) -> None:
        """Boot the guest; return when it answers on ssh."""
        self.program.log.unlink(missing_ok=True)
        architecture = self._variant.architecture
        self.accelerator = "kvm" if kvm_boots(self.disk, architecture) else architecture.accelerator
        self.program.start(self._qemu())
        self._connection = Path(tempfile.mkdtemp(prefix=session.name("guest")))
        if not wait_until(lambda: not self.program.pid or self._connect(), timeout_s, 0.5):
            self.stop()
            raise RuntimeError(
                f"the guest did not answer on ssh in {timeout_s:.0f} s; its"
                f" console:\n{self.program.tail(40)}"
            )
        if not self.program.pid:
            self.stop()
            raise RuntimeError(
                f"the guest ended while booting; its console:\n{self.program.tail(40)}"
            )

    def _connect(self) -> bool:
        """Open the ssh connection that all commands use; return whether this succeeded."""
        # Each new connection takes emulated processors some seconds. This one ends with the guest.
        command = [*self._ssh_command(), "-f", "-N", "-M"]
        return (
            subprocess.run(
                command,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                check=False,
            ).returncode
            == 0
        )

    def _qemu(self) -> list[str]:
        forward = "".join(
            f",hostfwd=tcp:127.0.0.1:{here}-:{there}" for here, there in self._forward.items()
        )
        # A process for each connection: without `cmd` all of the guest's would share one.
        for there, here in self._services.items():
            forward += f",guestfwd=tcp:{SERVICES}:{there}-cmd:busybox nc 127.0.0.1 {here}"
        architecture = self._variant.architecture
        arguments = (
            f"console={architecture.console} quiet root=/dev/vda rw net.ifnames=0 mitigations=off"
            " systemd.show_status=0"
        )
        arguments += f" audit=0 panic=-1 oops=panic {self._variant.arguments}"
        drives = [f"file={self.disk}/disk.img,if=virtio,format=raw,cache=unsafe"]
        drives += [f"file={disk},if=virtio,format=raw,readonly=on" for disk in self.disks]
        return [
            architecture.qemu,
            *architecture.machine,
            "-accel",
            self.accelerator,
            "-smp",
            "2",
            "-m",
            str(self.memory_mib),
            "-nographic",
            "-no-reboot",
            "-kernel",
            str(self.disk / "vmlinuz"),
            "-initrd",
            str(self.disk / "initrd.gz"),
            "-snapshot",
            "-append",
            arguments,
            *(word for drive in drives for word in ("-drive", drive)),
            "-netdev",
            f"user,id=n0,restrict=on{forward}",
            "-device",
            "virtio-net-pci,netdev=n0,romfile=",
            *(self._link.options() if self._link else []),
        ]

    def ssh(
        self,
        command: str,
        *,
        check: bool = True,
        stdin: bytes | None = None,
        timeout_s: float = 600,
    ) -> subprocess.CompletedProcess[bytes]:
        """Run a shell command in the guest as root; return its exit code and output."""
        done = subprocess.run(
            [*self._ssh_command(), command],
            input=stdin if stdin is not None else b"",
            capture_output=True,
            timeout=timeout_s,
            check=False,
        )
        if check and done.returncode:
            raise RuntimeError(
                f"in the guest: {command}: exit code"
                f" {done.returncode}\n{done.stdout.decode()}{done.stderr.decode()}"
            )
        return done

    def _ssh_command(self) -> list[str]:
        options = (
            "StrictHostKeyChecking=no",
            "UserKnownHostsFile=/dev/null",
            "ConnectTimeout=30",
            "ServerAliveInterval=15",
            "ServerAliveCountMax=8",
            "LogLevel=ERROR",
            f"ControlPath={self._connection / 'ssh' if self._connection else 'none'}",
        )
        return [
            "ssh",
            "-q",
            "-i",
            f"{self.disk}/key",
            *(f"-o{o}" for o in options),
            "-p",
            str(self.port),
            "root@127.0.0.1",
        ]

    def push_project(self) -> None:
        """Copy the checkout, with uncommitted changes and what `make build` made, to
        /root/project."""
        buffer = io.BytesIO()
        listing = subprocess.run(
            ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
            cwd=PROJECT,
            capture_output=True,
            check=True,
        ).stdout
        names = [n.decode() for n in listing.split(b"\0") if n]
        built = {str(p.relative_to(PROJECT)): p for p in PROJECT.glob("cri_server/api/*_pb2*")}
        built |= {f"pyrunc/native/{p.name}": p for p in native_programs(self._variant.architecture)}
        with tarfile.open(fileobj=buffer, mode="w:gz", compresslevel=1) as archive:
            for name, path in sorted(({name: PROJECT / name for name in names} | built).items()):
                if path.exists():
                    archive.add(path, arcname=name, recursive=False)
        self.ssh("mkdir -p /root/project && tar xzf - -C /root/project", stdin=buffer.getvalue())

    def stop(self) -> None:
        """Power off the guest and discard its changes to the disk."""
        if self.program.pid:
            # the machine may be busy; the kill below needs no answer
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.ssh("systemctl poweroff --force --force", check=False, timeout_s=15)
        wait_until(lambda: not self.program.pid, 10)
        self.program.stop()
        if self._connection is not None:
            shutil.rmtree(self._connection, ignore_errors=True)
            self._connection = None

    def __enter__(self) -> Guest:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()


def native_programs(architecture: Architecture) -> list[Path]:
    """Return the project's C programs for the guest's processors."""
    if architecture.is_native:
        return list(PROJECT.glob("pyrunc/native/*"))
    _run("make", "-s", "-C", str(PROJECT / "pause"), architecture.debian)
    return list((PROJECT / f"pause/build/{architecture.python}").iterdir())


def kvm_boots(disk: Path, architecture: Architecture = AMD64, within_s: float = 10) -> bool:
    """Return whether /dev/kvm boots this kernel into its initrd; some machines have a /dev/kvm that
    boots nothing."""
    if not architecture.is_native or not os.access("/dev/kvm", os.R_OK | os.W_OK):
        return False
    command = [
        architecture.qemu,
        *architecture.machine,
        "-accel",
        "kvm",
        "-m",
        "512",
        "-nographic",
        "-no-reboot",
        "-kernel",
        str(disk / "vmlinuz"),
        "-initrd",
        str(disk / "initrd.gz"),
        "-append",
        f"console={architecture.console} quiet",
    ]
    probe = subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
    )
    assert probe.stdout
    os.set_blocking(probe.stdout.fileno(), False)
    seen, deadline = b"", time.monotonic() + within_s
    try:
        while time.monotonic() < deadline and probe.poll() is None and b"initrd-is-up" not in seen:
            seen += probe.stdout.read() or b""
            time.sleep(0.1)
    finally:
        probe.kill()
        probe.wait()
        probe.stdout.close()
    return b"initrd-is-up" in seen


def free_port() -> int:
    """Return a port of 127.0.0.1 without a listener, outside of the kernel's range for clients."""
    first, count = 20000, 12000
    while True:
        port = first + secrets.randbelow(count)
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port


def _run(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(
            f"{' '.join(command)}: exit code"
            f" {done.returncode}\n{done.stdout[-3000:]}{done.stderr[-3000:]}"
        )


def main(arguments: Sequence[str]) -> None:
    """Build, start or stop a guest, or run a command in it."""
    verb = arguments[0] if arguments else ""
    suite, port = os.environ.get("GUEST_SUITE", "trixie"), int(os.environ.get("GUEST_PORT", "2222"))
    variant = EMULATED_ARM64 if os.environ.get("GUEST_ARCHITECTURE") == "arm64" else PLAIN
    if verb == "build":
        print(build(suite, variant))
    elif verb == "start":
        guest = Guest(suite, port=port, variant=variant)
        guest.start()
        guest.push_project()
        print(
            f"ssh -i {guest.disk}/key -p {guest.port} root@127.0.0.1    # the project is in"
            " /root/project, its Python is /opt/venv/bin/python"
        )
    elif verb == "ssh":
        done = Guest(suite, port=port, variant=variant).ssh(" ".join(arguments[1:]), check=False)
        sys.stdout.buffer.write(done.stdout + done.stderr)
        sys.exit(done.returncode)
    elif verb == "stop":
        Guest(suite, port=port, variant=variant).stop()
    else:
        sys.exit("usage: python -m tests.support.guest build|start|ssh COMMAND...|stop")


if __name__ == "__main__":
    main(sys.argv[1:])

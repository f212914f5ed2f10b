"""Downloads from Debian's mirrors: packages, which are unpacked into image layers, and sources of
packages."""

from __future__ import annotations

import io
import subprocess
import tarfile
import tempfile
from pathlib import Path

from cri_server.images.archives import build

MERGED = ("bin", "lib", "lib64", "sbin")
"""From Debian 13 on packages have these below /usr, and the links to them are a whole system's."""


def suite() -> str:
    """Return this machine's Debian release, such as `bookworm`."""
    lines = Path("/etc/os-release").read_text().splitlines()
    return dict(line.split("=", 1) for line in lines if "=" in line)["VERSION_CODENAME"]


def unpacked(packages: str, release: str = "") -> bytes:
    """Return a layer with the files of `packages` (separated by commas) and of their dependencies,
    unpacked but not configured.

    `release`: the packages' Debian release; "": this machine's.
    """
    with tempfile.NamedTemporaryFile(suffix=".tar") as out:
        # To configure packages, their scripts would need a whole system.
        command = ["mmdebstrap", "--quiet", "--variant=extract", f"--include={packages}"]
        subprocess.run([*command, release or suite(), out.name], check=True, capture_output=True)
        return Path(out.name).read_bytes()


def links_of_a_system(layer: bytes) -> build.Files:
    """Return the links of merged folders, such as /lib64, through which programs find their loader;
    empty if the layer has them."""
    with tarfile.open(fileobj=io.BytesIO(layer)) as archive:
        names = archive.getnames()
    tops = {name.removeprefix("./").split("/")[0] for name in names}
    if not tops.isdisjoint(MERGED):
        return {}
    return {name: build.symlink(f"usr/{name}") for name in MERGED}


def upstream_source(package: str, folder: Path) -> Path:
    """Download the upstream tarball of Debian's source package `package`, without Debian's changes,
    to `folder`; return its path.

    Uses the machine's mirrors and keys, but does not change the machine's package lists.
    """
    release = suite()
    lists = folder / "lists"
    (lists / "partial").mkdir(parents=True, exist_ok=True)
    sources = folder / "sources.list"
    sources.write_text("".join(f"deb-src {site} {release} main\n" for site in _mirrors(release)))
    options = [
        *(
            "-o",
            f"Dir::Etc::sourcelist={sources}",
            "-o",
            "Dir::Etc::sourceparts=-",
            "-o",
            f"Dir::State::lists={lists}",
        ),
        *(
            "-o",
            "Dir::Cache::pkgcache=",
            "-o",
            "Dir::Cache::srcpkgcache=",
            "-o",
            "APT::Sandbox::User=root",
        ),
    ]
    for words in (["update"], ["source", "--download-only", package]):
        done = subprocess.run(
            ["apt-get", *options, *words], cwd=folder, capture_output=True, text=True
        )
        if done.returncode:
            raise RuntimeError(
                f"apt-get {' '.join(words)}: exit code {done.returncode}\n{done.stderr}"
            )
    (tarball,) = (path for path in folder.glob(f"{package}_*.orig.tar.*") if path.suffix != ".asc")
    return tarball


def _mirrors(release: str) -> list[str]:
    """Return the mirrors in this machine's apt sources that serve the release."""
    listing = subprocess.run(
        [
            "apt-get",
            "indextargets",
            "--format",
            "$(SITE) $(RELEASE) $(COMPONENT)",
            "Created-By: Packages",
        ],
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    lines = [line.split() for line in listing.splitlines()]
    sites = [words[0] for words in lines if words[1:] == [release, "main"]]
    if not sites:
        raise RuntimeError(f"apt has no source for {release} main")
    return list(dict.fromkeys(sites))

"""The supported versions of the CNI specification, and what each version changed.

0.1.0, 0.2.0  results have one address of each family, in ip4 and ip6, and no interfaces
0.3.0, 0.3.1  results have lists of interfaces and ips; every ip has "version": "4" or "6"
0.4.0         adds CHECK; DEL also gets prevResult
1.0.0         ips have no "version"; a network's configuration is always a list of plugins
1.1.0         adds STATUS and GC; interfaces have mtu, socketPath, pciID; routes have mtu,
              advmss, priority, table, scope
"""

from __future__ import annotations

import functools
from enum import Enum

from cni_plugins.protocol.errors import DECODING_FAILURE, INCOMPATIBLE_VERSION, CniError

SUPPORTED = ("0.1.0", "0.2.0", "0.3.0", "0.3.1", "0.4.0", "1.0.0", "1.1.0")
LATEST = SUPPORTED[-1]
DEFAULT = "0.1.0"
"""The version of a configuration without cniVersion, or with an empty one (libcni,
pkg/version/conf.go)."""


class Form(Enum):
    """A form of a result's JSON. Several versions share one form."""

    SINGLE_ADDRESSES = "ip4 and ip6"
    VERSIONED_LISTS = "ips with a version"
    LISTS = "ips without a version"
    NEWEST = "interfaces with mtu"


FORMS = {
    "0.1.0": Form.SINGLE_ADDRESSES,
    "0.2.0": Form.SINGLE_ADDRESSES,
    "0.3.0": Form.VERSIONED_LISTS,
    "0.3.1": Form.VERSIONED_LISTS,
    "0.4.0": Form.VERSIONED_LISTS,
    "1.0.0": Form.LISTS,
    "1.1.0": Form.NEWEST,
}
"""Version -> the form of its results."""


@functools.lru_cache(maxsize=16)
def parse(text: str) -> tuple[int, int, int]:
    """Return the three numbers of a version such as 1.0.0. Raises CniError DECODING_FAILURE."""
    parts = text.split(".")
    # isascii(), because str.isdigit() is true of "²", which int() refuses.
    if len(parts) != 3 or not all(p.isascii() and p.isdigit() and len(p) < 6 for p in parts):
        raise CniError(DECODING_FAILURE, f"{text[:40]!r} is not a CNI version")
    return int(parts[0]), int(parts[1]), int(parts[2])


def at_least(version: str, other: str) -> bool:
    return parse(version) >= parse(other)


def require_supported(version: str) -> None:
    """Raise CniError INCOMPATIBLE_VERSION for a version that is not in SUPPORTED."""
    if version not in SUPPORTED:
        raise CniError(
            INCOMPATIBLE_VERSION,
            f"CNI version {version[:40]!r} is not supported",
            f"supported are {', '.join(SUPPORTED)}",
        )


def announcement() -> dict[str, object]:
    """Return the JSON object that answers the command VERSION."""
    return {"cniVersion": SUPPORTED[-1], "supportedVersions": list(SUPPORTED)}

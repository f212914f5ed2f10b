"""Builds the configuration of `pyrunc spec --rootless`: the default one, reduced to the rights of
an ordinary user."""

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any


def for_an_ordinary_user(document: dict[str, Any], uid: int, gid: int) -> dict[str, Any]:
    """Change the configuration so that an ordinary user can run it:

    - a user namespace that maps `uid` and `gid` to root
    - the host's network, and /sys as a bind mount
    - no limits
    - no mount options `uid=` and `gid=`
    """
    linux = document["linux"]
    linux["namespaces"] = [item for item in linux["namespaces"] if item["type"] != "network"] + [
        {"type": "user"}
    ]
    linux["uidMappings"] = [{"containerID": 0, "hostID": uid, "size": 1}]
    linux["gidMappings"] = [{"containerID": 0, "hostID": gid, "size": 1}]
    linux.pop("resources", None)
    document["mounts"] = [_mount(mount) for mount in document["mounts"]]
    return document


def _mount(mount: dict[str, Any]) -> dict[str, Any]:
    if mount["destination"] == "/sys":
        options = ["rbind", "nosuid", "noexec", "nodev", "ro"]
        return {"destination": "/sys", "type": "none", "source": "/sys", "options": options}
    options = [
        option for option in mount.get("options", []) if not option.startswith(("gid=", "uid="))
    ]
    return {**mount, "options": options}

"""Builds the OCI process object of an `exec`: from a file, or from the container's process and the
options of the command line."""

from __future__ import annotations

from pyrunc import jsontext
from pyrunc.errors import InvalidArgument, InvalidSpec

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import Any

MAX_ID = (1 << 32) - 2
# options whose value replaces a field of the process
REPLACED_FIELDS = {"cwd": "cwd", "apparmor": "apparmorProfile", "process_label": "selinuxLabel"}


def process_from_options(
    base: dict[str, Any], options: dict[str, Any], command: Sequence[str]
) -> dict[str, Any]:
    """Return the OCI process object of an exec: the container's process object `base`, changed by
    the command line's `options`, with `command` as the arguments. Raises InvalidArgument,
    InvalidSpec."""
    if not command:
        raise InvalidArgument("exec needs a command, or --process")
    process = {**base, "args": list(command), "terminal": options["tty"]}
    if options["env"]:
        # Appended, because the last of two values wins (`plan.identity.environment`).
        process["env"] = [*(base.get("env") or []), *options["env"]]
    if options["user"] or options["additional_gids"]:
        process["user"] = _user(
            base.get("user") or {}, options["user"] or "", options["additional_gids"]
        )
    if options["cap"]:
        process["capabilities"] = _more_capabilities(base.get("capabilities") or {}, options["cap"])
    if options["no_new_privs"] is not None:
        process["noNewPrivileges"] = options["no_new_privs"]
    for option, field in REPLACED_FIELDS.items():
        if options[option]:
            process[field] = options[option]
    return process


def process_from_file(path: str, text: bytes) -> dict[str, Any]:
    """Parse the OCI process object in `text`, the content of `path`. Raises InvalidArgument,
    InvalidSpec."""
    try:
        process = jsontext.loads(text)
    except ValueError as error:
        raise InvalidArgument(f"--process {path}: not JSON: {error}") from None
    if not isinstance(process, dict):
        raise InvalidSpec("process", "must be a JSON object")
    return process


def _user(base: dict[str, Any], text: str, groups: Sequence[str]) -> dict[str, Any]:
    """Return `base`, the container's user object, with the ids in `text` (`UID` or `UID:GID`) and
    the additional `groups`. Raises InvalidArgument for anything but numbers: ignoring text after a
    number would choose another user (CVE-2026-30892)."""
    user = dict(base)
    if text:
        uid, colon, gid = text.partition(":")
        user["uid"] = _id(uid, text)
        if colon:
            user["gid"] = _id(gid, text)
    if groups:
        user["additionalGids"] = [
            *(base.get("additionalGids") or []),
            *(_id(gid, gid) for gid in groups),
        ]
    return user


def _id(digits: str, text: str) -> int:
    if not (digits.isascii() and digits.isdigit()) or int(digits) > MAX_ID:
        raise InvalidArgument(f"invalid user or group {text!r}: expected a numeric UID or UID:GID")
    return int(digits)


def _more_capabilities(base: dict[str, Any], added: Sequence[str]) -> dict[str, Any]:
    """Return the capabilities `base` after adding the names `added` to the sets bounding, effective
    and permitted. The names are added to ambient only if the container has inheritable capabilities
    (CVE-2022-29162)."""
    sets = ["bounding", "effective", "permitted"] + ["ambient"] * bool(base.get("inheritable"))
    return {
        **base,
        **{name: list(dict.fromkeys([*(base.get(name) or []), *added])) for name in sets},
    }

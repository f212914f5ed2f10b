"""Resolves the user and groups of a container's process in the image's /etc/passwd and /etc/group,
never in the host's.

Both files are hostile input. They are parsed as in runc (moby/sys/user): comments, and blanks
around a line, are ignored, and a missing gid is 0. Other invalid lines are skipped; runc would read
an invalid number as 0, which is root. Ids out of range are refused (CVE-2024-40635).

A number is always an id, never a name. Otherwise an account called `1000` with uid 0 would give
root to a container for which the pod and kubelet's runAsNonRoot expect an ordinary user
(CVE-2026-46680).
"""

from __future__ import annotations

import io
from collections.abc import Iterator
from dataclasses import dataclass

from cri_server.api import api_pb2 as api
from cri_server.store.model import ResolvedUser
from pyrunc.errors import InvalidArgument

# 2^32-1 is (uid_t)-1; runc, containerd and Kubernetes stop at 2^31-1.
HIGHEST_ID = 2**31 - 1
FIELDS = 7  # of a line in /etc/passwd


@dataclass(frozen=True, slots=True)
class Account:
    """A line of /etc/passwd."""

    name: str
    uid: int
    gid: int
    home: str


@dataclass(frozen=True, slots=True)
class Group:
    """A line of /etc/group."""

    name: str
    gid: int
    members: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Accounts:
    """The users and groups of an image."""

    users: tuple[Account, ...] = ()
    groups: tuple[Group, ...] = ()

    @classmethod
    def parse(cls, passwd: bytes, group: bytes) -> Accounts:
        return cls(tuple(_passwd(passwd)), tuple(_group(group)))


def resolve(
    context: api.LinuxContainerSecurityContext, image_user: str, accounts: Accounts
) -> ResolvedUser:
    """Return the user and groups of the process. The user is the request's user name, else the
    request's number, else the image's USER, else root.

    Raises InvalidArgument for unknown names, ids out of range, and a group without a user.
    """
    named = bool(context.run_as_username) or context.HasField("run_as_user")
    if context.HasField("run_as_group") and not named:
        raise InvalidArgument(
            "security_context.run_as_group without run_as_user or run_as_username"
        )
    if context.run_as_username:
        text, image_group = context.run_as_username, ""
    elif context.HasField("run_as_user"):
        text, image_group = str(_require_id(context.run_as_user.value, "run_as_user")), ""
    else:
        text, _, image_group = image_user.partition(":")
    account = _account(text or "0", accounts)
    gid = _primary(context, image_group, account, accounts)
    return ResolvedUser(
        account.uid, gid, _supplemental(context, account, gid, accounts), account.home
    )


def home_of(uid: int, passwd: bytes) -> str:
    """Return the home of user `uid` according to `passwd`, the content of /etc/passwd; `/` if it
    does not list the user."""
    return next((account.home for account in _passwd(passwd) if account.uid == uid), "/")


def _account(text: str, accounts: Accounts) -> Account:
    if not _is_number(text):
        for account in accounts.users:
            if account.name == text:
                return account
        raise InvalidArgument(f"user {text[:80]!r} is not in the image's /etc/passwd")
    uid = _number(text, "user")
    for account in accounts.users:
        if account.uid == uid:
            return account
    return Account("", uid, 0, "/")


def _primary(
    context: api.LinuxContainerSecurityContext,
    image_group: str,
    account: Account,
    accounts: Accounts,
) -> int:
    if context.HasField("run_as_group"):
        return _require_id(context.run_as_group.value, "run_as_group")
    if not image_group:
        return account.gid
    if _is_number(image_group):
        return _number(image_group, "group")
    for group in accounts.groups:
        if group.name == image_group:
            return group.gid
    raise InvalidArgument(f"group {image_group[:80]!r} is not in the image's /etc/group")


def _supplemental(
    context: api.LinuxContainerSecurityContext, account: Account, gid: int, accounts: Accounts
) -> tuple[int, ...]:
    """Return the supplementary groups: the primary group, then the groups of the image's /etc/group
    if the policy is Merge, then the request's groups. Raises InvalidArgument for a requested id out
    of range and for an unknown policy."""
    requested = [_require_id(g, "supplemental_groups") for g in context.supplemental_groups]
    image_groups = []
    if context.supplemental_groups_policy == api.Merge and account.name:
        image_groups = [group.gid for group in accounts.groups if account.name in group.members]
    elif context.supplemental_groups_policy not in (api.Merge, api.Strict):
        raise InvalidArgument(
            f"supplemental_groups_policy: unknown value {context.supplemental_groups_policy}"
        )
    # containerd, CRI-O and Kubernetes' tests have this order (test/e2e_node,
    # "SupplementalGroupsPolicy").
    # The primary group is in the list, so that a process cannot leave this group to get around a
    # file mode that denies the group access (CVE-2022-2995, CVE-2023-25173).
    return tuple(dict.fromkeys([gid, *image_groups, *requested]))


def _require_id(value: int, what: str) -> int:
    if not 0 <= value <= HIGHEST_ID:
        raise InvalidArgument(f"{what}: {value} is not in 0..{HIGHEST_ID}")
    return value


def _is_number(text: str) -> bool:
    """Return whether `text` has only digits. Such a text is an id, not a name, even if the number
    is too large."""
    return text.isascii() and text.isdigit()


def _number(text: str, what: str) -> int:
    """Parse a user or group id. Raises InvalidArgument for an id out of range. `what`: `user` or
    `group`, for the error message."""
    # int() of a long text is slow and limited by sys.int_info.default_max_str_digits.
    digits = text.lstrip("0") or "0"
    if len(digits) > len(str(HIGHEST_ID)):
        raise InvalidArgument(f"{what}: {text[:80]} is not in 0..{HIGHEST_ID}")
    return _require_id(int(digits), what)


def _id(text: str) -> int | None:
    return int(text) if len(text) <= 20 and _is_number(text) and int(text) <= HIGHEST_ID else None


def _gid(fields: list[str], position: int) -> int | None:
    """Return the group id in `fields[position]`: 0 if the field is empty or missing, None if it is
    invalid."""
    return _id((fields[position] if len(fields) > position else "") or "0")


def _fields(content: bytes, count: int) -> Iterator[list[str]]:
    for line in map(bytes.strip, io.BytesIO(content)):
        fields = line.decode("utf-8", "surrogateescape").split(":", FIELDS)
        if len(fields) >= count and not line.startswith(b"#"):
            yield fields


def _passwd(content: bytes) -> Iterator[Account]:
    for fields in _fields(content, 3):
        uid, gid = _id(fields[2]), _gid(fields, 3)
        if fields[0] and uid is not None and gid is not None:
            home = fields[5] if len(fields) > 5 else ""
            safe = home.startswith("/") and "\0" not in home and "\r" not in home
            yield Account(fields[0], uid, gid, home if safe else "/")


def _group(content: bytes) -> Iterator[Group]:
    for fields in _fields(content, 2):
        gid = _gid(fields, 2)
        if fields[0] and gid is not None:
            members = tuple(m for m in fields[3].split(",") if m) if len(fields) > 3 else ()
            yield Group(fields[0], gid, members)

"""How a plugin refuses: an object with a numeric code on stdout, and exit status 1 (CNI spec,
section 5, "Error")."""

from __future__ import annotations

from typing import Any

from pyrunc.errors import Error

INCOMPATIBLE_VERSION = 1
UNSUPPORTED_FIELD = 2
UNKNOWN_CONTAINER = 3
INVALID_ENVIRONMENT = 4
IO_FAILURE = 5
DECODING_FAILURE = 6
INVALID_CONFIG = 7
TRY_AGAIN_LATER = 11
NOT_AVAILABLE = 50
INTERNAL = 999
"""Codes from 100 on belong to the plugins; 999 is what the reference implementation says for
anything else."""

NO_ADDRESS_LEFT = 110
"""Ours: host-local has handed out every address of a range."""

TAKEN = 111
"""Ours: another pod has what is asked for, such as a host port."""

IMPOSSIBLE = 112
"""Ours: nobody could do what is asked for a pod, such as a host port on ::1."""

DAMAGED = 120
"""Ours: CHECK found that something is not as ADD left it."""


class CniError(Error):
    """A refusal with its `code`; `details` may explain at length."""

    kind = "peer"

    def __init__(self, code: int, message: str, details: str = "") -> None:
        super().__init__(message)
        self.code, self.details = code, details

    def to_json(self, cni_version: str) -> dict[str, Any]:
        """The error object of the specification."""
        value: dict[str, Any] = {"cniVersion": cni_version, "code": self.code, "msg": self.message}
        if self.details:
            value["details"] = self.details
        return value


def from_json(value: dict[str, Any]) -> CniError:
    """The error in a plugin's answer; whatever is missing or of a wrong type is replaced."""
    code, message, details = value.get("code"), value.get("msg"), value.get("details")
    return CniError(
        code if isinstance(code, int) and not isinstance(code, bool) else INTERNAL,
        _one_line(message) or "the plugin gave no message",
        _one_line(details),
    )


def _one_line(value: object) -> str:
    return " ".join(value.split())[:2000] if isinstance(value, str) else ""

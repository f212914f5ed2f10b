"""A plugin's error: a JSON object with a numeric code on stdout, and exit code 1 (CNI spec, section
5, "Error")."""

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
"""The code of an error to which none of the codes above applies, as in the reference
implementation. Codes from 100 on belong to the plugins."""

NO_ADDRESS_LEFT = 110
"""Only in pyrunc's plugins: host-local has no free address in a range."""

TAKEN = 111
"""Only in pyrunc's plugins: another pod has the requested resource, such as a host port."""

IMPOSSIBLE = 112
"""Only in pyrunc's plugins: the request can never be fulfilled, such as a host port on ::1."""

DAMAGED = 120
"""Only in pyrunc's plugins: CHECK found a difference from the result of ADD."""


class CniError(Error):
    """An error that a plugin reports.

    - `code`: the CNI error code: a constant of this module, or a foreign plugin's own code
    - `details`: a longer explanation
    """

    kind = "peer"

    def __init__(self, code: int, message: str, details: str = "") -> None:
        super().__init__(message)
        self.code, self.details = code, details

    def to_json(self, cni_version: str) -> dict[str, Any]:
        """Return the error as CNI's JSON object of the given version."""
        value: dict[str, Any] = {"cniVersion": cni_version, "code": self.code, "msg": self.message}
        if self.details:
            value["details"] = self.details
        return value


def from_json(value: dict[str, Any]) -> CniError:
    """Parse the error object that a plugin has printed. Replaces missing and invalid fields with
    defaults."""
    code, message, details = value.get("code"), value.get("msg"), value.get("details")
    return CniError(
        # bool is a kind of int in Python: JSON's `true` would be code 1.
        code if isinstance(code, int) and not isinstance(code, bool) else INTERNAL,
        _one_line(message) or "the plugin gave no message",
        _one_line(details),
    )


def _one_line(value: object) -> str:
    return " ".join(value.split())[:2000] if isinstance(value, str) else ""

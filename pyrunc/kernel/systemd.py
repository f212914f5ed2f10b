"""Makes, changes and stops transient units of systemd over D-Bus, for containers' cgroups.

Each use opens a new blocking connection, because a shim is a fork and cannot inherit a connection.
No other module imports jeepney. Source: org.freedesktop.systemd1(5).
"""

from __future__ import annotations

import os
import time

from pyrunc.errors import DeadlineExceeded, PeerError, Unsupported
from pyrunc.kernel.credential import is_machine_root, outer_uid

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import Any

    Property = tuple[str, tuple[str, Any]]

NAME, MANAGER_PATH = "org.freedesktop.systemd1", "/org/freedesktop/systemd1"
MANAGER, PROPERTIES = f"{NAME}.Manager", "org.freedesktop.DBus.Properties"
REPLACE = "replace"
UNIT_EXISTS, NO_SUCH_UNIT = f"{NAME}.UnitExists", f"{NAME}.NoSuchUnit"
# The first is the default of D-Bus libraries (libdbus, sd-bus).
CALL_TIMEOUT_S, JOB_TIMEOUT_S = 25.0, 30.0


class SystemdRefused(PeerError):
    """systemd answered a call with an error. `name`: the error's D-Bus name."""

    def __init__(self, call: str, name: str, text: str) -> None:
        super().__init__(f"systemd refused {call}: {text or name}")
        self.name = name


class Systemd:
    """A connection to systemd, as a context manager: to the system instance for root, to the user
    instance for other users."""

    def __init__(self) -> None:
        from jeepney import DBusAddress

        try:
            self._connection = _open_bus("SYSTEM" if is_machine_root() else _user_bus())
        except (OSError, KeyError, StopIteration, RuntimeError) as error:
            raise Unsupported(
                f"the systemd cgroup driver cannot reach the D-Bus: {error}"
            ) from None
        self._manager = DBusAddress(MANAGER_PATH, bus_name=NAME, interface=MANAGER)

    def __enter__(self) -> Systemd:
        return self

    def __exit__(self, *error: object) -> None:
        self._connection.close()

    def start_transient(self, unit: str, properties: Sequence[Property]) -> None:
        """Make and start a transient unit; returns when systemd has started it. A failed unit with
        this name is reset first. Raises PeerError, DeadlineExceeded."""
        body: tuple[Any, ...] = (unit, REPLACE, list(properties), [])
        try:
            self._job("StartTransientUnit", "ssa(sv)a(sa(sv))", body, unit)
        except SystemdRefused as error:
            if error.name != UNIT_EXISTS:
                raise
            # A unit that failed stays loaded and holds its name until it is reset. runc resets it,
            # too.
            self.reset_failed(unit)
            self._job("StartTransientUnit", "ssa(sv)a(sa(sv))", body, unit)

    def stop(self, unit: str) -> None:
        """Stop a unit; returns when systemd has stopped it. Does nothing when the unit does not
        exist. Raises PeerError, DeadlineExceeded."""
        try:
            self._job("StopUnit", "ss", (unit, REPLACE), unit)
        except SystemdRefused as error:
            if error.name != NO_SUCH_UNIT:
                raise

    def reset_failed(self, unit: str) -> None:
        """Reset a failed unit, so that its name is free. Does nothing when the unit does not
        exist."""
        try:
            self._call("ResetFailedUnit", "s", (unit,))
        except SystemdRefused as error:
            if error.name != NO_SUCH_UNIT:
                raise

    def set_properties(self, unit: str, properties: Sequence[Property]) -> None:
        """Change properties of a running unit. The changes end with the unit."""
        self._call("SetUnitProperties", "sba(sv)", (unit, True, list(properties)))

    def control_group(self, unit: str) -> str:
        """Return the unit's path in the cgroup tree, empty when it has none."""
        from jeepney import DBusAddress

        (path,) = self._call("GetUnit", "s", (unit,))
        interface = f"{NAME}.{unit.rpartition('.')[2].capitalize()}"
        reply = self._call(
            "Get", "ss", (interface, "ControlGroup"), DBusAddress(path, NAME, PROPERTIES)
        )
        return str(reply[0][1])

    def _job(self, method: str, signature: str, body: tuple[Any, ...], unit: str) -> None:
        """Call a method that queues a systemd job, and wait for the job's end. Raises PeerError,
        DeadlineExceeded."""
        from jeepney import MatchRule, message_bus

        rule = MatchRule(type="signal", interface=MANAGER, member="JobRemoved", path=MANAGER_PATH)
        # JobRemoved may be sent before the reply that names the job, so signals of all jobs are
        # collected from before the call.
        self._send(message_bus.AddMatch(rule), "AddMatch")
        with self._connection.filter(rule, bufsize=1000) as ended:
            (job,) = self._call(method, signature, body)
            deadline = time.monotonic() + JOB_TIMEOUT_S
            while True:
                try:
                    message = self._connection.recv_until_filtered(
                        ended, timeout=max(deadline - time.monotonic(), 0)
                    )
                except TimeoutError:
                    raise DeadlineExceeded(
                        f"systemd did not finish {method} of {unit} within {JOB_TIMEOUT_S:g} s"
                    ) from None
                _, path, _, result = message.body
                if path == job:
                    break
        if result != "done":
            raise PeerError(f"systemd's job {method} of {unit} ended as {result!r}")

    def _call(
        self, method: str, signature: str, body: tuple[Any, ...], address: Any = None
    ) -> tuple[Any, ...]:
        from jeepney import new_method_call

        return self._send(
            new_method_call(address or self._manager, method, signature, body), method
        )

    def _send(self, message: Any, method: str) -> tuple[Any, ...]:
        from jeepney import HeaderFields, MessageType

        try:
            reply = self._connection.send_and_get_reply(message, timeout=CALL_TIMEOUT_S)
        except TimeoutError:
            raise DeadlineExceeded(
                f"systemd did not answer {method} within {CALL_TIMEOUT_S:g} s"
            ) from None
        except OSError as error:
            raise PeerError(f"the D-Bus connection broke during {method}: {error}") from None
        if reply.header.message_type == MessageType.error:
            name = reply.header.fields.get(HeaderFields.error_name, "")
            raise SystemdRefused(method, str(name), str(reply.body[0]) if reply.body else "")
        body: tuple[Any, ...] = reply.body
        return body


def _open_bus(bus: str) -> Any:
    """Connect to the D-Bus `bus` (`SYSTEM`, or an address) and return the connection. Raises
    OSError, RuntimeError.

    Authenticates with the user id that the bus sees for our socket. In a user namespace this
    differs from ours (D-Bus specification, "Authentication protocol", EXTERNAL).
    """
    import socket

    from jeepney.bus import get_bus
    from jeepney.io.blocking import DBusConnection

    connection = socket.socket(socket.AF_UNIX)
    try:
        # A bus that does not answer must not hang a create for ever.
        connection.settimeout(CALL_TIMEOUT_S)
        connection.connect(get_bus(bus))
        connection.sendall(b"\0AUTH EXTERNAL %s\r\n" % str(outer_uid()).encode().hex().encode())
        answer = connection.recv(1024)
        if not answer.startswith(b"OK"):
            raise RuntimeError(f"not authenticated: {answer.decode('ascii', 'replace').strip()}")
        connection.sendall(b"BEGIN\r\n")
        connection.settimeout(None)
        return DBusConnection(connection)
    except BaseException:
        connection.close()
        raise


def _user_bus() -> str:
    address = os.environ.get("DBUS_SESSION_BUS_ADDRESS", "")
    runtime = os.environ.get("XDG_RUNTIME_DIR", "")
    if not address and runtime:
        address = f"unix:path={runtime}/bus"
    if not address:
        raise Unsupported(
            "the systemd cgroup driver needs DBUS_SESSION_BUS_ADDRESS or XDG_RUNTIME_DIR"
        )
    return address

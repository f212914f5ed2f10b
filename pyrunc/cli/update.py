"""The verbs that change a running container: pause, resume, update."""

from __future__ import annotations

import sys

from pyrunc import jsontext
from pyrunc.container import state as states
from pyrunc.errors import InvalidArgument
from pyrunc.kernel.fd import read_file
from pyrunc.spec.shape import RESOURCES, shaped

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from pyrunc.cli.log import CommandLog
    from pyrunc.cli.parse import CommandLine


def pause(call: CommandLine, log: CommandLog) -> int:
    """Run `pause ID`."""
    from pyrunc.container.pause import pause as freeze

    state = states.find(states.root_of(call.globals["root"]), call.arguments[0])
    with states.Lock(state) as state:
        freeze(state)
    return 0


def resume(call: CommandLine, log: CommandLog) -> int:
    """Run `resume ID`."""
    from pyrunc.container.pause import resume as thaw

    state = states.find(states.root_of(call.globals["root"]), call.arguments[0])
    with states.Lock(state) as state:
        thaw(state)
    return 0


def update(call: CommandLine, log: CommandLog) -> int:
    """Run `update --resources FILE ID`, or `update` with a flag for each limit. With a file, all
    flags are ignored."""
    from pyrunc.container import update as limits

    resources = (
        _read(call.options["resources"])
        if call.options["resources"]
        else limits.from_options(call.options)
    )
    state = states.find(states.root_of(call.globals["root"]), call.arguments[0])
    with states.Lock(state) as state:
        log.warnings(limits.update(state, resources, call.globals["missing_controllers"]))
    return 0


def _read(path: str) -> dict[str, Any]:
    text = sys.stdin.buffer.read() if path == "-" else read_file(path)
    try:
        resources = jsontext.loads(text)
    except ValueError as error:
        raise InvalidArgument(f"--resources {path}: not JSON: {error}") from None
    # Checked like a bundle's resources: a null in the caller's file caused an internal error once.
    limits: dict[str, Any] = shaped(resources, RESOURCES, "linux.resources")
    return limits

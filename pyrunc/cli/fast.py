"""Runs one command line and returns its exit code, importing only what the verb needs."""

from __future__ import annotations

import sys

from pyrunc import debug
from pyrunc.cli.log import CommandLog, describe_error
from pyrunc.cli.parse import CommandLine, Misuse, parse
from pyrunc.errors import Error, InvalidArgument

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

# runc's exit codes: with 255 callers tell a failed exec from a command that ended with 1.
FAILED, EXEC_FAILED = 1, 255
STARTS_A_PROCESS = ("create", "run", "start", "exec", "restore")


def run(argv: Sequence[str]) -> int:
    """Run the command line and return the exit code:

    - 0: success
    - 1: an error, or `plan --diff` found a difference
    - 255: a failed `exec`
    - otherwise: the exit code of an attached container or command
    """
    try:
        call = parse(argv)
    except Misuse as error:
        return misuse(error)
    if call.globals["version"]:
        return version()
    if call.help or call.verb is None or not call.verb.fast:
        from pyrunc.cli import click_front

        return click_front.run(call)
    return do(call)


def do(call: CommandLine) -> int:
    """Run the verb of a parsed command line and report its errors; return the exit code."""
    assert call.verb is not None
    try:
        log = CommandLog.of(call.globals)
    except (Error, OSError) as error:
        print(describe_error(error), file=sys.stderr)
        return FAILED
    if log.debugs:
        debug.listen(log.debug)
    debug.say("pyrunc %s %s", call.verb.name, " ".join(call.arguments))
    if call.globals["criu"]:
        log.warning("--criu has no effect: pyrunc searches criu in $PATH")
    try:
        if call.globals["rootless"] not in ("true", "false", "auto"):
            raise InvalidArgument(
                f"--rootless {call.globals['rootless']!r} is not one of true, false, auto"
            )
        return _work(call.verb.work)(call, log)
    except Exception as error:
        if not isinstance(error, Error | OSError) and call.globals["debug"]:
            import traceback

            traceback.print_exc()
        prefix = f"pyrunc {call.verb.name} failed: " if call.verb.name in STARTS_A_PROCESS else ""
        log.error(prefix + describe_error(error))
        return EXEC_FAILED if call.verb.name == "exec" else FAILED


def _work(name: str) -> Callable[[CommandLine, CommandLog], int]:
    module_name, _, function = name.partition(":")
    # By name, so that a verb loads its own module only.
    module = __import__(f"pyrunc.cli.{module_name}", fromlist=[function])
    work: Callable[[CommandLine, CommandLog], int] = getattr(module, function)
    return work


def misuse(error: Misuse) -> int:
    """Report a wrong command line on stderr and in the log file, and print the verb's usage on
    stdout. Returns 1."""
    print(f"pyrunc: {error.message}", file=sys.stderr)
    if error.globals is not None and error.globals["log"]:
        try:
            CommandLog.of(error.globals).record(error.message)
        except (Error, OSError):
            pass  # it is on stderr already
    verb = f" {error.verb.name}" if error.verb else ""
    print(f"USAGE: pyrunc{verb} [options]{_arguments(error)}   (see pyrunc{verb} --help)")
    return FAILED


def _arguments(error: Misuse) -> str:
    if error.verb is None:
        return " COMMAND ..."
    return "".join(
        f" {name}" if index < error.verb.least else f" [{name}]"
        for index, name in enumerate(error.verb.arguments)
    )


def version() -> int:
    """Print the versions of pyrunc, of the specification and of libseccomp, a line each."""
    import pyrunc

    print(f"pyrunc version {pyrunc.__version__}\nspec: 1.3.0")
    try:
        from pyrunc.kernel import seccomp

        print(f"libseccomp: {seccomp.version()}")
    except Error:
        pass
    return 0

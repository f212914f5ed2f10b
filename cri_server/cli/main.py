"""The command line `pyrunc-cri`. `serve` runs the server, and most other verbs call a running
server."""

from __future__ import annotations

import gc
import importlib
import os
import signal
import sys
from typing import Any

import click

import pyrunc
from cri_server.cli.output.report import exit_code, report
from pyrunc.cli.log import describe_error
from pyrunc.errors import Error

# gRPC must not install fork handlers: this process never forks (grpc issues 13998, 32857).
os.environ["GRPC_ENABLE_FORK_SUPPORT"] = "0"

ADDRESS = "unix:///run/pyrunc/cri.sock"


# Section of `--help` -> verb -> module and attribute. A verb is imported when it is used, because
# imports are most of the run time of a short command.
SECTIONS = {
    "Pods and containers": {
        "run": "pods.run.run",
        "exec": "streams.execute.exec_",
        "attach": "streams.execute.attach",
        "wait": "containers.wait.wait",
        "port-forward": "streams.forward.port_forward",
        "cp": "containers.copy.cp",
        "diff": "containers.diff.diff",
        "stop": "containers.stop.stop",
        "stopp": "containers.stop.stopp",
        "kill": "containers.stop.kill",
        "rm": "containers.stop.rm",
        "rmp": "containers.stop.rmp",
        "restart": "pods.restart.restart",
        "start": "pods.restart.start",
        "runp": "pods.messages.runp",
        "create": "pods.messages.create",
        "pause": "containers.freeze.pause",
        "unpause": "containers.freeze.unpause",
        "checkpoint": "containers.checkpoint.checkpoint",
        "update": "containers.update.update",
    },
    "Observation": {
        "ps": "observe.listing.ps",
        "pods": "observe.listing.pods",
        "logs": "streams.logs.logs",
        "inspect": "observe.inspect.inspect",
        "inspectp": "observe.inspect.inspectp",
        "inspecti": "observe.inspect.inspecti",
        "stats": "observe.usage.stats",
        "statsp": "observe.usage.statsp",
        "top": "observe.top.top",
        "events": "observe.events.events",
        "timeline": "observe.timeline.timeline",
        "metricsp": "server.node.metricsp",
        "info": "server.node.info",
        "version": "server.node.version",
    },
    "Images": {
        "images": "images.image.images",
        "image": "images.image.image",
        "pull": "images.transfer.pull",
        "push": "images.transfer.push",
        "load": "images.transfer.load",
        "save": "images.transfer.save",
        "tag": "images.transfer.tag",
        "history": "images.clean.history",
        "rmi": "images.clean.rmi",
        "prune": "images.clean.prune",
        "login": "images.transfer.login",
        "logout": "images.transfer.logout",
        "registry": "images.registry.registry",
        "images-fs": "server.node.images_fs",
    },
    "Server and node": {
        "runtime-config": "server.node.runtime_config",
        "metricdescs": "server.node.metricdescs",
        "help": "help.help_",
        "serve": "server.serve.serve",
        "config": "server.configuration.config",
        "install-node": "server.install_node.install_node",
        "doctor": "server.doctor.doctor",
        "gc": "server.gc.gc",
        "explain": "server.explain.explain",
        "debug": "server.debug.debug",
        "demo": "pods.demo.demo",
        "demo-server": "pods.demo.demo_server",
        "completion": "arguments.completion.command",
    },
}
COMMANDS = {verb: place for verbs in SECTIONS.values() for verb, place in verbs.items()}
# names of other tools for our commands; help does not list them
ALIASES = {"imagefsinfo": "images-fs", "img": "images", "resume": "unpause"}

SUMMARY_CHARACTERS = 80 - 6 - max(map(len, COMMANDS))
_GROUP = "verbs have no group: ps, images, inspect, prune, …"
# verbs of other tools -> what to use instead
INSTEAD = {
    **dict.fromkeys(("play", "kube"), "run POD.YAML starts a pod with its containers"),
    **dict.fromkeys(("container", "pod", "system"), _GROUP),
    **dict.fromkeys(
        ("build", "commit"),
        "build images with another program, such as buildah, and import them with load or pull",
    ),
    **dict.fromkeys(
        ("network", "volume"), "networks come from CNI, volumes from the manifest of a Pod: see run"
    ),
    "restore": "run POD.YAML with `image: /PATH` of an archive that checkpoint has written",
    "rename": "names come from the manifest; tag renames an image",
    "export": "cp CONTAINER:PATH - writes files of a container to stdout as an archive",
    "apply": "run POD.YAML",
    "delete": "rm",
    "describe": "inspect",
    "get": "ps, pods, images; -o json or -o yaml",
}


class Commands(click.Group):
    """The click group of all verbs. Imports a verb's module when the verb is used."""

    def invoke(self, context: click.Context) -> Any:
        """Run a verb and flush its output. A closed pipe or an interrupt raises Exit, with the code
        that a shell reports for SIGPIPE or SIGINT. Other failures of the output raise Error."""
        try:
            result = super().invoke(context)
            sys.stdout.flush()
            return result
        except BrokenPipeError:
            raise click.exceptions.Exit(_reader_left()) from None
        except KeyboardInterrupt:
            # A shell reports this code for a program that SIGINT has ended.
            raise click.exceptions.Exit(128 + signal.SIGINT) from None
        except OSError as error:
            raise Error(describe_error(error)) from None
        except UnicodeEncodeError as error:
            raise Error(f"{error.object!r} is not UTF-8") from None

    def list_commands(self, context: click.Context) -> list[str]:
        return list(COMMANDS)

    def format_commands(self, context: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the verbs into the help, in sections."""
        for title, names in SECTIONS.items():
            commands = {name: self.get_command(context, name) for name in names}
            rows = [
                (name, command.get_short_help_str())
                for name, command in commands.items()
                if command and not command.hidden
            ]
            with formatter.section(title):
                formatter.write_dl(rows)

    def resolve_command(
        self, context: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Find the verb that the arguments name. Raises click.UsageError with suggestions for an
        unknown verb."""
        name = args[0]
        if name in COMMANDS or name in ALIASES or name.startswith("-"):
            return super().resolve_command(context, args)
        if name in INSTEAD:
            raise click.UsageError(f"No such command {name!r}: {INSTEAD[name]}", context)
        import difflib

        near = difflib.get_close_matches(name, [*COMMANDS, *ALIASES], 3)
        suggestion = f" Did you mean {' or '.join(near)}?" if near else ""
        raise click.UsageError(f"No such command {name!r}.{suggestion}", context)

    def get_command(self, context: click.Context, name: str) -> click.Command | None:
        name = ALIASES.get(name, name)
        if name not in COMMANDS:
            return None
        module, _, attribute = COMMANDS[name].rpartition(".")
        command: click.Command = getattr(
            importlib.import_module(f"cri_server.cli.{module}"), attribute
        )
        if not gc.isenabled():  # disabled by `main`
            # The objects of the imports live to the end; later collections skip them (gc.freeze).
            gc.freeze()
            gc.enable()
        command.short_help = command.short_help or summary(command.help or "")
        return command


@click.command(
    cls=Commands,
    context_settings={
        "help_option_names": ["-h", "--help"],
        "auto_envvar_prefix": "PYRUNC_CRI",
        "max_content_width": 110,
    },
)
@click.version_option(pyrunc.__version__, prog_name="pyrunc-cri")
@click.option(
    "-r",
    "--address",
    "--runtime-endpoint",
    "address",
    default=ADDRESS,
    show_default=True,
    # The second one is crictl's variable.
    envvar=["PYRUNC_CRI_ADDRESS", "CONTAINER_RUNTIME_ENDPOINT"],
    help="The socket of the running server.",
)
@click.pass_context
def program(context: click.Context, address: str) -> None:
    """A container runtime for Kubernetes, with commands for people."""
    context.obj = address


def summary(text: str) -> str:
    """Shorten a help text to its first sentence or, if that is too long for a line of 80 columns,
    to the beginning of the sentence."""
    sentence = " ".join(text.split("\n\n")[0].split()).partition(". ")[0].rstrip(".")
    for end in ("", "; ", ": ", " (", ", "):
        short = sentence.partition(end)[0] if end else sentence
        if len(short) <= SUMMARY_CHARACTERS:
            return short
    return sentence


def _reader_left() -> int:
    """Discard all further output after the reader has closed the pipe. Returns the exit code that a
    shell reports for SIGPIPE."""
    null = os.open(os.devnull, os.O_WRONLY)
    for stream in (1, 2):  # the interpreter flushes their buffers when it ends
        os.dup2(null, stream)
    os.close(null)
    return 128 + signal.SIGPIPE


def main() -> None:
    """Run the command line and exit with its code. Prints an Error as one line on stderr."""
    _open_standard_streams()
    # a collection after the imports would take 6 of the 100 ms of a short command
    gc.disable()
    try:
        code = program(prog_name="pyrunc-cri", standalone_mode=False)
        sys.exit(code if isinstance(code, int) else 0)
    except (click.Abort, KeyboardInterrupt):
        if sys.stderr.isatty():
            click.echo(err=True)  # the question's line ends
        sys.exit(128 + signal.SIGINT)
    except click.ClickException as error:
        error.show()
        sys.exit(error.exit_code)
    except Error as error:
        report(str(error))
        sys.exit(exit_code(error))


def _open_standard_streams() -> None:
    """Open /dev/null as stdin, stdout and stderr where they are closed (`>&-`), so that no other
    file gets their descriptor numbers."""
    while (number := os.open(os.devnull, os.O_RDWR)) <= 2:
        os.set_inheritable(number, True)
    os.close(number)
    for name, number, mode in (("stdin", 0, "r"), ("stdout", 1, "w"), ("stderr", 2, "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, open(number, mode, closefd=False))


if __name__ == "__main__":
    # Otherwise sys.path[0] would be the working directory (-m) or the folder `cli` (`python FILE`),
    # whose packages could be imported as `images` or `server`.
    sys.path[0] = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
    main()

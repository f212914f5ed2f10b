"""Manual pages (man(7)), generated from the click commands and the configuration's keys."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

import click

import pyrunc
from cri_server.install.config_file import sections

FILES = {
    "/etc/pyrunc/config.toml": "The server's configuration: pyrunc-config(5).",
    "/etc/pyrunc/config.toml.d/*.toml": "Files that override it key by key.",
    "/run/pyrunc/cri.sock": "The server's socket.",
    "/run/pyrunc-cri": "The state directory: sockets, and files that are valid in this boot only.",
    "/var/lib/pyrunc": "The root directory: images, writable layers and records.",
    "/var/lib/pyrunc-pods": "Logs and volumes of the pods of `run`.",
    "/etc/cni/net.d": "CNI configuration: the network of pods.",
    "/opt/cni/bin": "CNI plugins.",
}
EXIT_STATUS = """\
0 on success, 1 after an error, 2 after a wrong command line. Commands that run a program in a
container end with the exit status of that program.
"""
CONFIG_RULES = """\
/etc/pyrunc/config.toml is TOML. The files /etc/pyrunc/config.toml.d/*.toml override it key by key,
in the order of their names. Every key has a default. An unknown key, a wrong type or a value out of
range is an error: the server does not start, and pyrunc-cri config check names file, line and key.
SIGHUP (systemctl reload pyrunc-cri) makes a server read the files again.
"""
SEE_ALSO = ("pyrunc(8)", "pyrunc-cri(8)", "pyrunc-config(5)")


def command_page(name: str, program: click.Group) -> str:
    """Return the page of the executable `name` in section 8, with all commands of `program`."""
    context = click.Context(program, info_name=name)
    about = _first_line(program.help)
    return "".join(
        [
            _head(name, 8, about),
            _section("SYNOPSIS", [_bold(name), " [OPTIONS] COMMAND [ARGUMENTS]\n"]),
            _section("DESCRIPTION", _paragraphs(program.help)),
            _section("OPTIONS", _options(program, context)),
            _section("COMMANDS", _commands(program, context)),
            _section("EXIT STATUS", [EXIT_STATUS]),
            _section("FILES", _items(FILES)) if name == "pyrunc-cri" else "",
            _see_also(f"{name}(8)"),
        ]
    )


def config_page() -> str:
    """Return pyrunc-config(5)."""
    body = [_head("pyrunc-config", 5, "the configuration file of pyrunc-cri")]
    body.append(_section("DESCRIPTION", [CONFIG_RULES]))
    for section in sections():
        keys = {f"{key.name} = {key.default}": key.about for key in section.keys}
        body.append(_section(f"[{section.name}]", [_escaped(section.about) + "\n", *_items(keys)]))
    body.append(_see_also("pyrunc-config(5)"))
    return "".join(body)


def _head(name: str, section: int, about: str) -> str:
    title = f'.TH {name.upper()} {section} "" "pyrunc {pyrunc.__version__}" "pyrunc"\n'
    return title + _section("NAME", [f"{_escaped(name)} \\- {_escaped(about)}\n"])


def _section(title: str, body: Iterable[str]) -> str:
    return f".SH {_quoted(title)}\n" + "".join(body)


def _see_also(own: str) -> str:
    return _section(
        "SEE ALSO", [", ".join(_escaped(page) for page in SEE_ALSO if page != own) + "\n"]
    )


def _commands(group: click.Group, context: click.Context, prefix: str = "") -> Iterator[str]:
    for name in group.list_commands(context):
        command = group.get_command(context, name)
        if command is None or command.hidden:
            continue
        inside = click.Context(command, info_name=name, parent=context)
        usage = " ".join([prefix + name, *command.collect_usage_pieces(inside)])
        yield f".SS {_quoted(usage)}\n"
        yield from _paragraphs(command.help)
        yield from _options(command, inside)
        if isinstance(command, click.Group):
            yield from _commands(command, inside, f"{prefix}{name} ")


def _options(command: click.Command, context: click.Context) -> Iterator[str]:
    for parameter in command.get_params(context):
        record = parameter.get_help_record(context) if isinstance(parameter, click.Option) else None
        if record is not None and (parameter.name != "help" or context.parent is None):
            yield from _items({record[0]: record[1]})


def _items(entries: Mapping[str, str]) -> Iterator[str]:
    for term, about in entries.items():
        yield f".TP\n{_bold(term)}\n{_escaped(about.strip())}\n"


def _paragraphs(text: str | None) -> Iterator[str]:
    """Yield the paragraphs of click's help. A paragraph that begins with \\b keeps its line
    breaks."""
    for index, block in enumerate(filter(None, (text or "").split("\n\n"))):
        yield ".PP\n" if index else ""
        lines = [line.strip() for line in block.strip().split("\n")]
        if lines[0] == "\b":
            yield ".nf\n" + "\n".join(map(_escaped, lines[1:])) + "\n.fi\n"
        else:
            yield _escaped(" ".join(lines)) + "\n"


def _first_line(text: str | None) -> str:
    sentence = (text or "").split("\n")[0].split(". ")[0].rstrip(".")
    return sentence[:1].lower() + sentence[1:]


def _bold(text: str) -> str:
    return f"\\fB{_escaped(text)}\\fR"


def _quoted(text: str) -> str:
    return '"' + _escaped(text).replace('"', "\\(dq") + '"'


def _escaped(text: str) -> str:
    """Escape text for roff: backslashes, backquotes, hyphens, and a `.` or `'` at the start, which
    would begin a request. Hyphens become minus signs, which can be copied."""
    plain = text.replace("\\", "\\e").replace("-", "\\-").replace("`", "\\`")
    return f"\\&{plain}" if plain.startswith((".", "'")) else plain

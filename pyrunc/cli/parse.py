"""Parses command lines by the rules of Go's flag package, as runc does. Does no I/O.

`-name` is `--name`. A value comes after `=` or as the next word, even if that word looks like an
option. A flag may have `=true` or `=false`. Options may come before or after the arguments. For a
verb whose arguments are another command line, options end at the first argument. `--` ends the
options.
"""

from __future__ import annotations

from pyrunc.cli.table import FLAG, GLOBAL, HELP, LIST, NUMBER, TRISTATE, VERBS, Option, Verb
from pyrunc.errors import InvalidArgument

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import Any

TRUE, FALSE = ("1", "t", "T", "true", "TRUE", "True"), ("0", "f", "F", "false", "FALSE", "False")


class CommandLine:
    """A parsed command line. Keys of options are long names with underscores (`pid_file`).

    - `globals`: the options before the verb
    - `verb`: None when the command line has no verb
    - `options`: the options after the verb
    - `arguments`: the verb's arguments
    - `help`: the command line has --help
    """

    __slots__ = ("arguments", "globals", "help", "options", "verb")

    def __init__(
        self,
        globals: dict[str, Any],
        verb: Verb | None,
        options: dict[str, Any],
        arguments: list[str],
    ) -> None:
        self.globals = globals
        self.verb = verb
        self.options = options
        self.arguments = arguments
        self.help = bool(globals["help"] or options.get("help"))


class Misuse(InvalidArgument):
    """A wrong command line.

    - `verb`: the verb whose options or arguments are wrong. None if the verb is unknown, or the
      options before the verb are wrong.
    - `globals`: the options before the verb. None if these are wrong.
    """

    def __init__(self, message: str, verb: Verb | None = None) -> None:
        super().__init__(message)
        self.verb = verb
        self.globals: dict[str, Any] | None = None


def parse(words: Sequence[str]) -> CommandLine:
    """Parse a command line. Raises Misuse, with Go's text where callers look for it (`flag needs
    an argument: -name`)."""
    globals, rest = _options(GLOBAL, words, leading=True, verb=None)
    try:
        return _parse_verb(globals, rest)
    except Misuse as error:
        error.globals = globals
        raise


def _parse_verb(globals: dict[str, Any], rest: list[str]) -> CommandLine:
    if not rest:
        return CommandLine(globals, None, {}, [])
    # urfave/cli, which runc uses, has this verb.
    if rest[0] in ("help", "h"):
        globals["help"], rest = True, rest[1:]
        if not rest:
            return CommandLine(globals, None, {}, [])
    verb = VERBS.get(rest[0])
    if verb is None:
        raise Misuse(f"unknown command {rest[0]!r}")
    options, arguments = _options((*verb.options, HELP), rest[1:], verb.leading, verb)
    call = CommandLine(globals, verb, options, arguments)
    if not call.help:
        _count(verb, arguments)
    return call


def _count(verb: Verb, arguments: list[str]) -> None:
    if len(arguments) < verb.least:
        kind = "exactly" if verb.most == verb.least else "a minimum of"
        raise Misuse(f'"{verb.name}" requires {kind} {verb.least} argument(s)', verb)
    if verb.most is not None and len(arguments) > verb.most:
        kind = "exactly" if verb.most == verb.least else "a maximum of"
        raise Misuse(f'"{verb.name}" requires {kind} {verb.most} argument(s)', verb)


def _options(
    options: tuple[Option, ...], words: Sequence[str], leading: bool, verb: Verb | None
) -> tuple[dict[str, Any], list[str]]:
    """Parse the options among `words`. Returns the values of all options by their keys (a missing
    option has its default), and the words that are not options. Raises Misuse with `verb`.

    `leading`: options end at the first word that is not an option.
    """
    by_name = {name: option for option in options for name in option.names}
    values: dict[str, Any] = {option.key: option.absent for option in options}
    rest: list[str] = []
    pending = iter(range(len(words)))
    for index in pending:
        word = words[index]
        if word == "--":
            rest += words[index + 1 :]
            break
        # A single `-` is an argument, such as the standard input (flag package of Go).
        if len(word) < 2 or word[0] != "-":
            if leading:
                rest += words[index:]
                break
            rest.append(word)
            continue
        name, equals, value = word[2 if word.startswith("--") else 1 :].partition("=")
        option = by_name.get(name)
        if option is None:
            raise Misuse(f"flag provided but not defined: -{name}", verb)
        flag = option.kind in (FLAG, TRISTATE)
        if not equals and not flag:
            following = next(pending, None)
            if following is None:
                raise Misuse(f"flag needs an argument: -{name}", verb)
            value = words[following]
        _store(values, option, name, value if equals or not flag else "true", verb)
    return values, rest


def _store(
    values: dict[str, Any], option: Option, name: str, value: str, verb: Verb | None
) -> None:
    if option.kind in (FLAG, TRISTATE):
        if value not in TRUE + FALSE:
            raise Misuse(f"invalid boolean value {value!r} for -{name}", verb)
        values[option.key] = value in TRUE
    elif option.kind == NUMBER:
        digits = value.removeprefix("-")
        if not (digits.isascii() and digits.isdigit()):
            raise Misuse(f"invalid value {value!r} for flag -{name}: not a number", verb)
        values[option.key] = int(value)
    elif option.kind == LIST:
        values[option.key] = (*values[option.key], value)
    else:
        values[option.key] = value

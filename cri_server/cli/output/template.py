"""The subset of Go's text/template that people use on command lines: `{{.status.state}}`, `{{range
.containers}}…{{end}}`, `{{if .x}}…{{else}}…{{end}}`, pipes and the functions of FUNCTIONS. Source:
pkg.go.dev/text/template.

A field is found by its exact name, else without regard to case: `{{.ID}}` is `id`. The error for an
unknown field lists the known fields.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from pyrunc.errors import InvalidArgument

ACTION = re.compile(r"\{\{(-\s)?\s*(.*?)\s*(\s-)?\}\}", re.DOTALL)
WORD = re.compile(
    r"""\s*("(?:[^"\\]|\\.)*"|`[^`]*`|\(|\)|\||\$?(?:\.[\w-]*)+|\$|-?\d+|\w+)""", re.DOTALL
)
ESCAPES = {r"\t": "\t", r"\n": "\n"}
LISTED_FIELDS = 12  # field names that an error lists
CONSTANTS = {"true": True, "false": False, "nil": None}


def _index(value: Any, *keys: Any) -> Any:
    for key in keys:
        try:
            value = value[key]
        except (KeyError, IndexError, TypeError):
            return ""
    return value


def _printf(form: str, *values: Any) -> str:
    left = iter(values)

    def word(match: re.Match[str]) -> str:
        text = _text(next(left, ""))
        return json.dumps(text) if match[1] == "q" else text

    return re.sub("%([svdq])", word, form)


FUNCTIONS: dict[str, Callable[..., Any]] = {
    "json": lambda value: json.dumps(value, ensure_ascii=False),
    "len": len,
    "index": _index,
    "join": lambda value, separator=" ": str(separator).join(map(_text, value)),
    "upper": lambda value: _text(value).upper(),
    "lower": lambda value: _text(value).lower(),
    "printf": _printf,
    "println": lambda *values: " ".join(map(_text, values)) + "\n",
    "eq": lambda left, *right: any(_text(left) == _text(each) for each in right),
    "ne": lambda left, right: _text(left) != _text(right),
    "not": lambda value: not value,
    "and": lambda *values: next((v for v in values if not v), values[-1]),
    "or": lambda *values: next((v for v in values if v), values[-1]),
}


@dataclass(slots=True)
class _Block:
    """The whole template, or the content of an `if`, `range` or `with` up to its `end`."""

    kind: str = ""
    pipe: str = ""
    parts: list[Any] = field(default_factory=list)  # text, ("print", pipe), _Block
    otherwise: list[Any] = field(default_factory=list)
    in_else: bool = False

    def add(self, part: Any) -> None:
        (self.otherwise if self.in_else else self.parts).append(part)


class Template:
    """A parsed template. `render` applies it to a JSON object."""

    def __init__(self, text: str) -> None:
        """Parse a template. Raises InvalidArgument."""
        self._text = text
        for escape, character in ESCAPES.items():
            text = text.replace(escape, character)
        self._root = self._parse(text)

    def render(self, value: Any) -> str:
        """Return the text of the template for a JSON object. Raises InvalidArgument, for example
        for an unknown field."""
        return self._parts(self._root.parts, value, value)

    def _wrong(self, problem: str) -> InvalidArgument:
        return InvalidArgument(f"template {self._text!r}: {problem}")

    # -- reading

    def _parse(self, text: str) -> _Block:
        stack, at = [_Block()], 0
        for match in ACTION.finditer(text):
            before = text[at : match.start()]
            before = before.rstrip() if match[1] else before
            if before:
                stack[-1].add(before)
            at = match.end()
            if match[3]:
                at += len(text) - at - len(text[at:].lstrip())
            self._action(match[2], stack)
        if len(stack) > 1:
            raise self._wrong(f"{stack[-1].kind!r} has no end")
        rest = text[at:]
        if "{{" in rest:
            raise self._wrong("'{{' has no '}}'")
        stack[0].add(rest)
        return stack[0]

    def _action(self, words: str, stack: list[_Block]) -> None:
        kind, _, rest = words.partition(" ")
        if words.startswith("/*"):
            return
        if kind in ("if", "range", "with"):
            block = _Block(kind, rest)
            stack[-1].add(block)
            stack.append(block)
        elif kind in ("else", "end") and len(stack) == 1:
            raise self._wrong(f"{kind!r} without a block")
        elif kind == "else":
            stack[-1].in_else = True
        elif kind == "end":
            stack.pop()
        else:
            stack[-1].add(("print", words))

    # -- rendering

    def _parts(self, parts: Sequence[Any], dot: Any, root: Any) -> str:
        out = []
        for part in parts:
            if isinstance(part, str):
                out.append(part)
            elif isinstance(part, tuple):
                out.append(_text(self._pipe(part[1], dot, root)))
            else:
                out.append(self._block(part, dot, root))
        return "".join(out)

    def _block(self, block: _Block, dot: Any, root: Any) -> str:
        value = self._pipe(block.pipe, dot, root)
        if not value:
            return self._parts(block.otherwise, dot, root)
        if block.kind == "if":
            return self._parts(block.parts, dot, root)
        if block.kind == "with":
            return self._parts(block.parts, value, root)
        if isinstance(value, Mapping):
            value = value.values()
        if isinstance(value, str) or not hasattr(value, "__iter__"):
            raise self._wrong(f"{block.pipe!r} is not a list")
        return "".join(self._parts(block.parts, each, root) for each in value)

    def _pipe(self, text: str, dot: Any, root: Any) -> Any:
        tokens = self._tokenize(text)
        value = self._expression(tokens, dot, root)
        if tokens:
            raise self._wrong(f"unexpected {tokens[0]!r}")
        return value

    def _tokenize(self, text: str) -> list[str]:
        tokens, at = [], 0
        while at < len(text.rstrip()):
            match = WORD.match(text, at)
            if match is None:
                raise self._wrong(f"syntax error at {text[at:].strip()!r}")
            tokens.append(match[1])
            at = match.end()
        return tokens

    def _expression(self, tokens: list[str], dot: Any, root: Any) -> Any:
        """Evaluate commands joined by `|`, removing their tokens from `tokens`. Each command gets
        the value of the previous one as its last argument."""
        piped: list[Any] = []
        while True:
            arguments = []
            while tokens and tokens[0] not in ("|", ")"):
                arguments.append(self._operand(tokens, dot, root))
            if not arguments:
                raise self._wrong("an expression is missing")
            piped = [self._call(arguments, piped)]
            if not tokens or tokens[0] == ")":
                return piped[0]
            tokens.pop(0)

    def _operand(self, tokens: list[str], dot: Any, root: Any) -> Any:
        word = tokens.pop(0)
        if word == "(":
            value = self._expression(tokens, dot, root)
            if not tokens:
                raise self._wrong("'(' has no ')'")
            tokens.pop(0)
            return value
        if word[0] == '"':
            return json.loads(word, strict=False)
        if word[0] == "`":
            return word[1:-1]
        if word[0] in ".$":
            return self._field(root if word[0] == "$" else dot, word.lstrip("$"))
        if word in FUNCTIONS:
            return FUNCTIONS[word]
        if word in CONSTANTS:
            return CONSTANTS[word]
        try:
            return int(word)
        except ValueError:
            names = ", ".join(sorted(FUNCTIONS))
            raise self._wrong(f"unknown function {word!r}; the functions are {names}") from None

    def _call(self, arguments: list[Any], piped: list[Any]) -> Any:
        function, *rest = arguments
        if not callable(function):
            if rest or piped:
                raise self._wrong(f"{function!r} is not a function")
            return function
        values = [*rest, *piped]
        if function is FUNCTIONS["join"] and len(values) == 2 and isinstance(values[0], str):
            values.reverse()  # `.list | join ","`
        try:
            return function(*values)
        except (TypeError, IndexError) as error:
            raise self._wrong(str(error)) from None

    def _field(self, value: Any, path: str) -> Any:
        for name in filter(None, path.split(".")):
            if not isinstance(value, Mapping):
                raise self._wrong(f"{path!r}: the value before {name!r} is not an object")
            # docker's templates use Go's field names (`.State`), JSON has lower case.
            key = name if name in value else _same(name, value)
            if key is None:
                names = ", ".join(list(map(str, value))[:LISTED_FIELDS])
                raise self._wrong(f"no field {name!r}; the fields are {names}")
            value = value[key]
        return value


def _same(name: str, value: Mapping[str, Any]) -> str | None:
    folded = name.lower()
    return next((key for key in value if str(key).lower() == folded), None)


def _text(value: Any) -> str:
    """Convert a value to text as Go does. Lists and objects become JSON."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if value is None:
        return "<no value>"
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)

"""Templates as Go's text/template writes them, as far as command lines use it: `{{.status.state}}`,
`{{range .containers}}…{{end}}`, `{{if .x}}…{{else}}…{{end}}`, pipes and the functions of
`FUNCTIONS`. Source: pkg.go.dev/text/template.

A field's name is taken as it is, else without regard to case: `{{.ID}}` is `id`. What is not there
is an error that says what is.
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
SHOWN_FIELDS = 12


def _index(value: Any, *keys: Any) -> Any:
    for key in keys:
        try:
            value = value[key]
        except (KeyError, IndexError, TypeError):
            return ""
    return value


def _printf(form: str, *values: Any) -> str:
    left = iter(values)

    def word(found: re.Match[str]) -> str:
        text = _text(next(left, ""))
        return json.dumps(text) if found[1] == "q" else text

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
    """A part of a template that holds others: the whole of it, or what stands between `if` or
    `range` and `end`."""

    kind: str = ""
    pipe: str = ""
    parts: list[Any] = field(default_factory=list)  # text, ("print", pipe), _Block
    otherwise: list[Any] = field(default_factory=list)
    in_else: bool = False

    def add(self, part: Any) -> None:
        (self.otherwise if self.in_else else self.parts).append(part)


class Template:
    """A template that was read once; `render` for each object."""

    def __init__(self, text: str) -> None:
        """Raises InvalidArgument."""
        self._text = text
        for escape, character in ESCAPES.items():
            text = text.replace(escape, character)
        self._root = self._parse(text)

    def render(self, value: Any) -> str:
        """The text for `value`: an object as JSON has it. Raises InvalidArgument for a field that
        is not there."""
        return self._parts(self._root.parts, value, value)

    def _wrong(self, problem: str) -> InvalidArgument:
        return InvalidArgument(f"template {self._text!r}: {problem}")

    # -- reading

    def _parse(self, text: str) -> _Block:
        stack, at = [_Block()], 0
        for found in ACTION.finditer(text):
            before = text[at : found.start()]
            before = before.rstrip() if found[1] else before
            if before:
                stack[-1].add(before)
            at = found.end()
            if found[3]:
                at += len(text) - at - len(text[at:].lstrip())
            self._action(found[2], stack)
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
            raise self._wrong(f"{block.pipe!r} is no list")
        return "".join(self._parts(block.parts, each, root) for each in value)

    def _pipe(self, text: str, dot: Any, root: Any) -> Any:
        words = self._words(text)
        value = self._expression(words, dot, root)
        if words:
            raise self._wrong(f"{words[0]!r} is not expected")
        return value

    def _words(self, text: str) -> list[str]:
        words, at = [], 0
        while at < len(text.rstrip()):
            found = WORD.match(text, at)
            if found is None:
                raise self._wrong(f"{text[at:].strip()!r} cannot be read")
            words.append(found[1])
            at = found.end()
        return words

    def _expression(self, words: list[str], dot: Any, root: Any) -> Any:
        """Commands with `|` between them: the value of each is the last argument of the next. Takes
        its words away."""
        value, first = None, True
        while True:
            arguments = []
            while words and words[0] not in ("|", ")"):
                arguments.append(self._operand(words, dot, root))
            if not arguments:
                raise self._wrong("an expression is missing")
            value = self._call(arguments, [] if first else [value])
            first = False
            if not words or words[0] == ")":
                return value
            words.pop(0)

    def _operand(self, words: list[str], dot: Any, root: Any) -> Any:
        word = words.pop(0)
        if word == "(":
            value = self._expression(words, dot, root)
            if not words:
                raise self._wrong("'(' has no ')'")
            words.pop(0)
            return value
        if word[0] == '"':
            return json.loads(word, strict=False)
        if word[0] == "`":
            return word[1:-1]
        if word[0] in ".$":
            return self._field(root if word[0] == "$" else dot, word.lstrip("$"))
        if word in FUNCTIONS:
            return FUNCTIONS[word]
        try:
            return (
                {"true": True, "false": False, "nil": None}[word]
                if not word[-1].isdigit()
                else int(word)
            )
        except (KeyError, ValueError):
            raise self._wrong(
                f"there is no function {word!r}; there are: {', '.join(sorted(FUNCTIONS))}"
            ) from None

    def _call(self, arguments: list[Any], piped: list[Any]) -> Any:
        function, *rest = arguments
        if not callable(function):
            if rest or piped:
                raise self._wrong(f"{function!r} is no function")
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
                raise self._wrong(f"{path!r}: what should hold {name!r} is no object")
            key = name if name in value else _same(name, value)
            if key is None:
                there = ", ".join(list(map(str, value))[:SHOWN_FIELDS])
                raise self._wrong(f"there is no field {name!r}; there are: {there}")
            value = value[key]
        return value


def _same(name: str, value: Mapping[str, Any]) -> str | None:
    folded = name.lower()
    return next((key for key in value if str(key).lower() == folded), None)


def _text(value: Any) -> str:
    """As Go prints it, lists and objects as JSON."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if value is None:
        return "<no value>"
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)

"""Records that our own processes exchange and write: `Value`s that both ends read and write by the
same class.

A record travels as a JSON object of its fields. The other end may be older or newer: what it does
not know it ignores, and a field that it may lack has a default. A field's annotation says what it
takes: `int`, `float`, `bool`, `str`, `Id` (a name without a slash), `AbsolutePath`, another record,
`Sequence[…]`, `dict[str, …]`, `X | None`, `Message` (an object that somebody else reads).
"""

from __future__ import annotations

import sys

from pyrunc.errors import InvalidArgument
from pyrunc.spec.value import Value

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from typing import Any, Self

    from pyrunc.errors import Error
    from pyrunc.ipc import Message

    Id = str
    AbsolutePath = str
    Read = Callable[[Any], Any]


class Record(Value):
    """A record. Its class is its contract: both ends import it."""

    def to_fields(self) -> Message:
        """The record as a JSON object, without what is None by default."""
        found = {}
        for name, default, holds_records in _shape_of(type(self)).written:
            value = getattr(self, name)
            if value is not None or default is not None:
                found[name] = _plain(value) if holds_records else value
        return found

    @classmethod
    def of(cls, found: Mapping[str, Any], error: type[Error] = InvalidArgument) -> Self:
        """The record that `to_fields` made. Raises `error`, which names the field that is missing
        or not what it must be."""
        values = []
        for name, read, what, default in _shape_of(cls).fields:
            value = found.get(name, _MISSING)
            if value is _MISSING:
                if default is _MISSING:
                    raise error(f"{cls.label()}: {name} is missing")
                values.append(default)
                continue
            try:
                values.append(read(value))
            except InvalidArgument as inner:
                raise error(inner.message) from None
            except (TypeError, ValueError, AttributeError):
                raise error(f"{cls.label()}: {name} is {value!r}, not {what}") from None
        return cls(*values)

    @classmethod
    def label(cls) -> str:
        """What an error calls the record."""
        return cls.__name__


class Request(Record):
    """A record that is a question: `call` names it."""

    call = ""

    def to_message(self) -> Message:
        """The question as it travels, but for its number."""
        return {"call": self.call, **self.to_fields()}

    @classmethod
    def label(cls) -> str:
        return cls.call


class _Shape:
    __slots__ = ("fields", "written")

    def __init__(self, kind: type[Record]) -> None:
        texts, defaults = kind.__annotations__, kind._defaults  # type: ignore[attr-defined]
        self.fields = [
            (name, *_reader(texts[name], kind), defaults.get(name, _MISSING))
            for name in kind._fields  # type: ignore[attr-defined]
        ]
        self.written = [
            (name, defaults.get(name, _MISSING), not _FLAT.issuperset(_words(texts[name])))
            for name in kind._fields  # type: ignore[attr-defined]
        ]


_MISSING = object()
_shapes: dict[type[Record], _Shape] = {}


def know(kind: type[Record] = Record) -> None:
    """Look at all kinds of records that there are, of `kind`, which happens at the first use of
    each otherwise."""
    for each in kind.__subclasses__():
        if each._fields:  # type: ignore[attr-defined]
            _shape_of(each)
        know(each)


def _shape_of(kind: type[Record]) -> _Shape:
    """Made at first use, for the records that a field names must exist."""
    found = _shapes.get(kind)
    if found is None:
        found = _shapes[kind] = _Shape(kind)
    return found


def _words(text: str) -> list[str]:
    """The names in an annotation."""
    for sign in "[],|":
        text = text.replace(sign, " ")
    return text.split()


def _plain(value: Any) -> Any:
    """Of a field in which there are records."""
    if isinstance(value, Record):
        return value.to_fields()
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    return value if value is None else [_plain(item) for item in value]


def _reader(text: str, kind: type[Record]) -> tuple[Read, str]:
    """What reads a value of this annotation, and the words for it. Raises TypeError for an
    annotation that is not one of a record."""
    if text.endswith(" | None"):
        read, what = _reader(text.removesuffix(" | None"), kind)
        return (lambda value: None if value is None else read(value)), what
    if text in _PLAIN:
        return _PLAIN[text]
    head, _, inner = text.removesuffix("]").partition("[")
    if head == "Sequence":
        item, what = _reader(inner, kind)
        return (
            lambda value: [item(one) for one in _a(list, value)]
        ), f"a list of which each is {what}"
    if head == "dict" and inner.startswith("str, "):
        item, what = _reader(inner.removeprefix("str, "), kind)
        return (
            lambda value: {key: item(one) for key, one in _a(dict, value).items()}
        ), f"an object of which each is {what}"
    named = getattr(sys.modules[kind.__module__], text, None)
    if isinstance(named, type) and issubclass(named, Record):
        return named.of, "an object of its fields"
    raise TypeError(f"{kind.__name__}: {text} is no type of a record's field")


def _a(kind: type, value: Any) -> Any:
    if type(value) is not kind:
        raise TypeError
    return value


def _number(value: Any) -> float:
    if type(value) not in (int, float):
        raise TypeError
    return value  # type: ignore[no-any-return]


def _id(value: Any) -> str:
    if not _a(str, value) or "/" in value:
        raise ValueError
    return value  # type: ignore[no-any-return]


def _absolute_path(value: Any) -> str:
    if not _a(str, value).startswith("/") or "\0" in value:
        raise ValueError
    return value  # type: ignore[no-any-return]


_PLAIN: dict[str, tuple[Read, str]] = {
    "int": (lambda value: _a(int, value), "a whole number"),
    "float": (_number, "a number"),
    "bool": (lambda value: _a(bool, value), "true or false"),
    "str": (lambda value: _a(str, value), "a text"),
    "Id": (_id, "a name"),
    "AbsolutePath": (_absolute_path, "an absolute path"),
    "Message": (lambda value: _a(dict, value), "an object"),
    "Any": (lambda value: value, "a value"),
}
_FLAT = frozenset([*_PLAIN, "None", "Sequence", "dict"])

"""Base classes of the messages between pyrunc's processes and of pyrunc's JSON files. Each message
and each file has one class, which the writer and the reader share.

A message or file is a JSON object with the fields of its class. The other end may be older or
newer: unknown fields are ignored, and a field that an older version lacks has a default. A field's
annotation is its type: `int`, `float`, `bool`, `str`, `Id` (a name without a slash),
`AbsolutePath`, another `Record` class, `Sequence[…]`, `dict[str, …]`, `X | None`, `Message` (any
JSON object), `Any`.

msgspec is not used here, because it imports `re` and `typing`, which costs every shim and every
`pyrunc` memory and time (docs/tried.md has the figures).
"""

from __future__ import annotations

import sys

from pyrunc import atomic_file
from pyrunc.atomic_file import DamagedRecord
from pyrunc.errors import InvalidArgument, NotFound
from pyrunc.spec.value import Value

TYPE_CHECKING = False
if TYPE_CHECKING:
    import os
    from collections.abc import Callable, Mapping
    from typing import Any, Self

    from pyrunc.errors import Error
    from pyrunc.ipc import Message

    Id = str
    AbsolutePath = str
    Read = Callable[[Any], Any]


class Record(Value):
    """A value that can be written as a JSON object and read from one. Base class of messages and of
    parts of files."""

    def to_fields(self) -> Message:
        """Return the fields as a JSON object. A field whose default is None is left out if its
        value is None."""
        fields = {}
        for name, default, holds_records in _shape_of(type(self)).written:
            value = getattr(self, name)
            if value is not None or default is not None:
                fields[name] = _to_json(value) if holds_records else value
        return fields

    @classmethod
    def of(cls, fields: Mapping[str, Any], error: type[Error] = InvalidArgument) -> Self:
        """Build an object of this class from a JSON object. If a field is missing or has another
        type, raises `error` with the field's path."""
        try:
            return cls._read(fields)
        except _WrongField as wrong:
            raise error(f"{cls.label()}: {wrong.path} {wrong.problem}") from None

    @classmethod
    def _read(cls, fields: Mapping[str, Any]) -> Self:
        """Build an object of this class from a JSON object. Raises _WrongField, which `of`
        converts."""
        values = []
        for name, read, expected, default in _shape_of(cls).fields:
            value = fields.get(name, _MISSING)
            if value is _MISSING:
                if default is _MISSING:
                    raise _WrongField(name, "is missing")
                values.append(default)
                continue
            try:
                values.append(read(value))
            except _WrongField as inner:
                raise inner.below(name) from None
            except (TypeError, ValueError, AttributeError):
                raise _WrongField(name, f"is {value!r}, not {expected}") from None
        return cls(*values)

    @classmethod
    def label(cls) -> str:
        """Return the name of this class for errors."""
        return cls.__name__


class Request(Record):
    """A request to another process. `call`: the request's name in the message."""

    call = ""

    def to_message(self) -> Message:
        """Return the request as the JSON object that is sent, without the request's number."""
        return {"call": self.call, **self.to_fields()}

    @classmethod
    def label(cls) -> str:
        return cls.call


class RecordFile(Record):
    """The content of the JSON file `name` in a folder. `earlier_name`: the file's name in an
    earlier version; may be empty."""

    name = earlier_name = ""

    def write(self, folder: str | os.PathLike[str], *, durable: bool = False) -> None:
        """Write the file in `folder`. `durable`: the file also survives a power cut. Raises
        OSError."""
        atomic_file.write_json(f"{folder}/{self.name}", self.to_fields(), durable=durable)

    @classmethod
    def read(cls, folder: str | os.PathLike[str]) -> Self:
        """Read the file in `folder`. Raises:

        - NotFound if there is no file
        - DamagedRecord if its content is wrong; the error message names a missing or wrong field
        - NewerRecord if a newer version has written it
        - OSError
        """
        try:
            content = atomic_file.read_json(f"{folder}/{cls.name}")
        except NotFound:
            if not cls.earlier_name:
                raise
            content = atomic_file.read_json(f"{folder}/{cls.earlier_name}")
        return cls.of(content, DamagedRecord)

    @classmethod
    def label(cls) -> str:
        return cls.name


class _WrongField(Exception):
    """A field cannot be read. `path`: the field's path in the object that is read."""

    def __init__(self, path: str, problem: str) -> None:
        self.path, self.problem = path, problem

    def below(self, name: str) -> _WrongField:
        """Return the same error for the enclosing object: `name` is put before the path. `name`:
        the field's name, `[index]` or `[key]` in the enclosing object."""
        dot = "" if self.path.startswith("[") else "."
        return _WrongField(f"{name}{dot}{self.path}", self.problem)


class _RecordFields:
    """How the fields of a Record class are read and written."""

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
_shapes: dict[type[Record], _RecordFields] = {}


def _shape_of(kind: type[Record]) -> _RecordFields:
    """Return how the fields of a Record class are read and written. This is computed at the first
    use, because the annotations may name classes that are defined later."""
    shape = _shapes.get(kind)
    if shape is None:
        shape = _shapes[kind] = _RecordFields(kind)
    return shape


def _words(text: str) -> list[str]:
    """Return the names in an annotation: `list[Id] | None` has `list`, `Id` and `None`."""
    for sign in "[],|":
        text = text.replace(sign, " ")
    return text.split()


def _to_json(value: Any) -> Any:
    """Return a field's value with each Record in it as a JSON object."""
    if isinstance(value, Record):
        return value.to_fields()
    if isinstance(value, dict):
        return {key: _to_json(item) for key, item in value.items()}
    return value if value is None else [_to_json(item) for item in value]


def _reader(text: str, kind: type[Record]) -> tuple[Read, str]:
    """Return the function that reads a value with the annotation `text`, and a description of the
    type for errors. `kind`: the Record class that has the field. Raises TypeError for an annotation
    that a Record class cannot have."""
    if text.endswith(" | None"):
        read, expected = _reader(text.removesuffix(" | None"), kind)
        return (lambda value: None if value is None else read(value)), expected
    if text in _SCALARS:
        return _SCALARS[text]
    head, _, inner = text.removesuffix("]").partition("[")
    if head == "Sequence":
        item, expected = _reader(inner, kind)
        return _list_of(item, expected), f"a list of which each is {expected}"
    if head == "dict" and inner.startswith("str, "):
        item, expected = _reader(inner.removeprefix("str, "), kind)
        return _object_of(item, expected), f"an object of which each is {expected}"
    named = getattr(sys.modules[kind.__module__], text, None)
    if isinstance(named, type) and issubclass(named, Record):
        return named._read, "an object of its fields"
    raise TypeError(f"{kind.__name__}: {text} is no type of a record's field")


def _list_of(read: Read, expected: str) -> Read:
    def read_list(value: Any) -> list[Any]:
        items = _checked(list, value)
        try:
            return [read(item) for item in items]
        except (_WrongField, TypeError, ValueError, AttributeError):
            for index, item in enumerate(items):
                _read_item(read, expected, f"[{index}]", item)
            raise

    return read_list


def _object_of(read: Read, expected: str) -> Read:
    def read_object(value: Any) -> dict[str, Any]:
        items = _checked(dict, value)
        try:
            return {key: read(item) for key, item in items.items()}
        except (_WrongField, TypeError, ValueError, AttributeError):
            for key, item in items.items():
                _read_item(read, expected, f"[{key!r}]", item)
            raise

    return read_object


def _read_item(read: Read, expected: str, place: str, item: Any) -> None:
    """Check one item of a list or object. If `item` cannot be read, raise _WrongField with `place`
    (`[index]` or `[key]`) as the path."""
    try:
        read(item)
    except _WrongField as inner:
        raise inner.below(place) from None
    except (TypeError, ValueError, AttributeError):
        raise _WrongField(place, f"is {item!r}, not {expected}") from None


def _checked(kind: type, value: Any) -> Any:
    # Not isinstance, for which True is an int.
    if type(value) is not kind:
        raise TypeError
    return value


def _number(value: Any) -> float:
    if type(value) not in (int, float):
        raise TypeError
    return value  # type: ignore[no-any-return]


def _id(value: Any) -> str:
    if not _checked(str, value) or "/" in value:
        raise ValueError
    return value  # type: ignore[no-any-return]


def _absolute_path(value: Any) -> str:
    if not _checked(str, value).startswith("/") or "\0" in value:
        raise ValueError
    return value  # type: ignore[no-any-return]


_SCALARS: dict[str, tuple[Read, str]] = {
    "int": (lambda value: _checked(int, value), "a whole number"),
    "float": (_number, "a number"),
    "bool": (lambda value: _checked(bool, value), "true or false"),
    "str": (lambda value: _checked(str, value), "a text"),
    "Id": (_id, "a name"),
    "AbsolutePath": (_absolute_path, "an absolute path"),
    "Message": (lambda value: _checked(dict, value), "an object"),
    "Any": (lambda value: value, "a value"),
}
_FLAT = frozenset([*_SCALARS, "None", "Sequence", "dict"])

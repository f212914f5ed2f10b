"""Values with named fields and slots, without the import cost of `dataclasses` (10 ms, which every
verb would pay).

A class that derives from `Value` lists its fields as annotations, like a dataclass. The type
checker sees a frozen dataclass. At run time no code is generated, so a class costs microseconds.
Defaults must be immutable.
"""

from __future__ import annotations

# not from `operator`, which imports more
from _operator import attrgetter

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, Self, dataclass_transform
else:

    def dataclass_transform(**_options):
        return lambda decorated: decorated


def _no_key(value: object) -> tuple[()]:
    return ()


@dataclass_transform(frozen_default=True)
class _ValueType(type):
    """Turns the annotations of a class into slots and stores their defaults in the class."""

    def __new__(mcs, name: str, bases: tuple[type, ...], namespace: dict[str, Any]) -> _ValueType:
        fields = tuple(namespace.get("__annotations__", ()))
        defaults = {field: namespace.pop(field) for field in fields if field in namespace}
        # The defaults were removed from the namespace, because a name cannot be a slot and a class
        # variable (ValueError).
        namespace["__slots__"] = fields
        cls = super().__new__(mcs, name, bases, namespace)
        cls._fields = fields  # type: ignore[attr-defined]
        # attrgetter is written in C and takes a tenth of the time of a loop with getattr.
        cls._key = (  # type: ignore[attr-defined]
            attrgetter(*fields) if fields else staticmethod(_no_key)
        )
        cls._defaults = defaults  # type: ignore[attr-defined]
        return cls


class Value(metaclass=_ValueType):
    """A plain value. Two values are equal if their classes and fields are equal."""

    # Only at run time: the type checker takes the signature from the annotations (PEP 681).
    if not TYPE_CHECKING:

        def __init__(self, *values, **named):
            fields = self._fields
            for field, value in zip(fields, values, strict=False):
                setattr(self, field, value)
            if len(values) != len(fields):
                if len(values) > len(fields):
                    raise TypeError(f"{type(self).__name__} takes {len(fields)} values")
                defaults = self._defaults
                for field in fields[len(values) :]:
                    if field in named:
                        setattr(self, field, named.pop(field))
                    elif field in defaults:
                        setattr(self, field, defaults[field])
                    else:
                        raise TypeError(f"{type(self).__name__} needs {field}")
            if named:
                raise TypeError(f"{type(self).__name__} has no field {', '.join(named)}")

    def replace(self, **changes: Any) -> Self:
        """Return a copy with some fields changed."""
        fields: tuple[str, ...] = self._fields  # type: ignore[attr-defined]
        return type(self)(
            *[changes.pop(f) if f in changes else getattr(self, f) for f in fields], **changes
        )

    def __eq__(self, other: object) -> bool:
        return type(self) is type(other) and (
            self._key(self) == self._key(other)  # type: ignore[attr-defined]
        )

    def __hash__(self) -> int:
        return hash((type(self), self._key(self)))  # type: ignore[attr-defined]

    def __repr__(self) -> str:
        fields: tuple[str, ...] = self._fields  # type: ignore[attr-defined]
        return f"{type(self).__name__}({', '.join(f'{f}={getattr(self, f)!r}' for f in fields)})"

"""Records that are files: each has one class that writes it and reads it again (`atomic_file`), in
this version and in others."""

from __future__ import annotations

from pyrunc import atomic_file
from pyrunc.atomic_file import DamagedRecord
from pyrunc.errors import NotFound
from pyrunc.records import Record

TYPE_CHECKING = False
if TYPE_CHECKING:
    import os
    from typing import Self


class RecordFile(Record):
    """A record that is the file `name` of a folder; an earlier version may have called it
    `earlier_name`."""

    name = earlier_name = ""

    def write(self, folder: str | os.PathLike[str], *, durable: bool = False) -> None:
        """`durable`: it outlives a power cut. Raises OSError."""
        atomic_file.write_json(f"{folder}/{self.name}", self.to_fields(), durable=durable)

    @classmethod
    def read(cls, folder: str | os.PathLike[str]) -> Self:
        """Raises NotFound, DamagedRecord (which names the field that is missing), OSError."""
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

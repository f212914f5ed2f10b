"""Records of the attached pods: DEL needs the configuration of the ADD, even if the files have
changed since.

One file per sandbox, written before the first plugin runs (without a result) and again after the
last one. Both are synced: the state of a plugin on disk, such as an address lease, outlives a power
cut, and only its DEL removes it. pyrunc's own plugins keep no such state. For a chain of these
alone the first record is written while the chain runs, and not synced: it survives a kill of the
server, and after a power cut that takes its content there is nothing to detach (`read`).
"""

from __future__ import annotations

import contextlib
import os
from dataclasses import dataclass, replace
from typing import Any

from cni_plugins.protocol.config import NetworkList, parse_list_object
from cni_plugins.protocol.errors import CniError
from cni_plugins.protocol.result import Result
from pyrunc.atomic_file import DamagedRecord, is_unwritten, read_json, remove_leftovers, write_json
from pyrunc.errors import Error, NotFound

_ENDING = ".json"


@dataclass(frozen=True, slots=True)
class Attachment:
    """A pod and its network at the time of the ADD. `netns_id`: device and inode of the namespace;
    `result`: None while ADD runs.

    begun: the number of the network's plugins that a failed ADD began; None: all of them, or
    unknown."""

    sandbox_id: str
    network: NetworkList
    netns_path: str
    netns_id: str
    arguments: tuple[tuple[str, str], ...]
    capabilities: dict[str, Any]
    result: Result | None = None
    begun: int | None = None

    def with_result(self, result: Result) -> Attachment:
        return replace(self, result=result)

    def with_path(self, netns_path: str) -> Attachment:
        """A copy for a namespace that is now at another path."""
        result = None if self.result is None else self.result.with_path(self.netns_path, netns_path)
        return replace(self, netns_path=netns_path, result=result)


class Attachments:
    """The records in one folder, which is created with mode 0700. All methods but `cached` access
    the disk."""

    def __init__(self, folder: str) -> None:
        self._folder = folder
        self._written: dict[str, Attachment] = {}  # the records that this server has written
        self._unsynced: set[str] = set()  # sandboxes whose record is not synced
        if os.path.isdir(folder):
            remove_leftovers(folder)

    def has(self, sandbox_id: str) -> bool:
        """Whether a record exists, even a damaged one; a single lookup of a name."""
        return os.path.exists(self._path(sandbox_id))

    def cached(self, sandbox_id: str) -> Attachment | None:
        """The record if this server has written it; None otherwise, even if a file exists."""
        return self._written.get(sandbox_id)

    def write(self, attachment: Attachment, *, durable: bool = True) -> None:
        """Write the record; `durable`: sync it. Raises OSError."""
        os.makedirs(self._folder, mode=0o700, exist_ok=True)
        result = attachment.result
        is_unsynced = attachment.sandbox_id in self._unsynced
        write_json(
            self._path(attachment.sandbox_id),
            {
                "sandbox_id": attachment.sandbox_id,
                "network": attachment.network.to_json(),
                "netns_path": attachment.netns_path,
                "netns_id": attachment.netns_id,
                "arguments": [list(pair) for pair in attachment.arguments],
                "capabilities": attachment.capabilities,
                "result": None
                if result is None
                else result.to_json(attachment.network.cni_version),
                "begun": attachment.begun,
            },
            durable=durable,
            named_first=is_unsynced,
        )
        self._written[attachment.sandbox_id] = attachment
        if durable:
            self._unsynced.discard(attachment.sandbox_id)
        else:
            self._unsynced.add(attachment.sandbox_id)

    def read(self, sandbox_id: str) -> Attachment | None:
        """The record of a sandbox; None if it is not attached. Raises DamagedRecord."""
        path = self._path(sandbox_id)
        try:
            record = read_json(path)
        except NotFound:
            return None
        except DamagedRecord:
            # A record without content was not synced before a power cut, so it was of pyrunc's own
            # plugins, which have no state left. Any other may be all that tells of a foreign
            # plugin's lease.
            if not is_unwritten(path):
                raise
            self.remove(sandbox_id)
            return None
        try:
            network = parse_list_object(record["network"])
            # Records of earlier versions lack "begun".
            result, begun = record["result"], record.get("begun")
            return Attachment(
                sandbox_id=str(record["sandbox_id"]),
                network=network,
                netns_path=str(record["netns_path"]),
                netns_id=str(record["netns_id"]),
                arguments=tuple((str(key), str(value)) for key, value in record["arguments"]),
                capabilities=dict(record["capabilities"]),
                result=None
                if result is None
                else Result.from_json(result, default_version=network.cni_version),
                begun=None if begun is None else int(begun),
            )
        except (CniError, KeyError, TypeError, ValueError) as error:
            raise DamagedRecord(f"{path}: {error}") from None

    def remove(self, sandbox_id: str) -> None:
        """Remove the record; does nothing if there is none. Raises OSError."""
        self._written.pop(sandbox_id, None)
        self._unsynced.discard(sandbox_id)
        with contextlib.suppress(FileNotFoundError):
            os.unlink(self._path(sandbox_id))

    def all(self) -> tuple[list[Attachment], list[str]]:
        """Every readable record, and a line for each damaged one."""
        attachments, damaged = [], []
        for name in sorted(os.listdir(self._folder)) if os.path.isdir(self._folder) else ():
            if not name.endswith(_ENDING):
                continue
            try:
                attachment = self.read(name.removesuffix(_ENDING))
            except (Error, OSError) as error:
                damaged.append(str(error))
                continue
            if attachment is not None:
                attachments.append(attachment)
        return attachments, damaged

    def _path(self, sandbox_id: str) -> str:
        return os.path.join(self._folder, sandbox_id + _ENDING)

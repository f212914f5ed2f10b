"""What is remembered about each attached pod: DEL must use the configuration of the ADD, whatever
happened since.

One file per sandbox, written before the first plugin runs (without a result) and again after the
last one. Both are durable: what a plugin keeps on disk, such as an address, outlives a power cut
and only its DEL gives it back. Nothing of our own plugins does, so of a chain that has no other the
first record is written while it runs, and not synced: a kill of the server leaves it on disk, and
where a power cut takes its content there is nothing to detach (`read`).
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
    """A pod and its network as of the ADD. `netns_id` is the namespace's device and inode; `result`
    None while ADD runs.

    begun: how many of the network's plugins ADD was begun for, of an ADD that failed; None: of all,
    or it is not known.
    """

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

    def moved(self, netns_path: str) -> Attachment:
        """The same when the namespace is found at another path."""
        result = None if self.result is None else self.result.moved(self.netns_path, netns_path)
        return replace(self, netns_path=netns_path, result=result)


class Attachments:
    """The records in one folder, which is made with mode 0700. All methods but `at_hand` touch the
    disk."""

    def __init__(self, folder: str) -> None:
        self._folder = folder
        self._written: dict[str, Attachment] = {}  # by this server: what their files say
        self._unsynced: set[str] = set()  # ids whose record a power cut may take
        if os.path.isdir(folder):
            remove_leftovers(folder)

    def has(self, sandbox_id: str) -> bool:
        """Whether there is a record, be it damaged; one lookup of a name."""
        return os.path.exists(self._path(sandbox_id))

    def at_hand(self, sandbox_id: str) -> Attachment | None:
        """What was written since the server started; None says nothing."""
        return self._written.get(sandbox_id)

    def write(self, attachment: Attachment, *, durable: bool = True) -> None:
        """Raises OSError."""
        os.makedirs(self._folder, mode=0o700, exist_ok=True)
        result = attachment.result
        may_be_lost = attachment.sandbox_id in self._unsynced
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
            named_first=may_be_lost,
        )
        self._written[attachment.sandbox_id] = attachment
        if durable:
            self._unsynced.discard(attachment.sandbox_id)
        else:
            self._unsynced.add(attachment.sandbox_id)

    def read(self, sandbox_id: str) -> Attachment | None:
        """None for a sandbox that is not attached. Raises DamagedRecord.

        A record without content was not synced before a power cut: it told of plugins of ours,
        which have nothing any more.
        """
        path = self._path(sandbox_id)
        try:
            record = read_json(path)
        except NotFound:
            return None
        except DamagedRecord:
            if not is_unwritten(path):
                raise
            self.forget(sandbox_id)
            return None
        try:
            network = parse_list_object(record["network"])
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

    def forget(self, sandbox_id: str) -> None:
        """Fine when there is nothing. Raises OSError."""
        self._written.pop(sandbox_id, None)
        self._unsynced.discard(sandbox_id)
        with contextlib.suppress(FileNotFoundError):
            os.unlink(self._path(sandbox_id))

    def all(self) -> tuple[list[Attachment], list[str]]:
        """Every readable record, and a line for each damaged one."""
        found, damaged = [], []
        for name in sorted(os.listdir(self._folder)) if os.path.isdir(self._folder) else ():
            if not name.endswith(_ENDING):
                continue
            try:
                attachment = self.read(name.removesuffix(_ENDING))
            except (Error, OSError) as error:
                damaged.append(str(error))
                continue
            if attachment is not None:
                found.append(attachment)
        return found, damaged

    def _path(self, sandbox_id: str) -> str:
        return os.path.join(self._folder, sandbox_id + _ENDING)

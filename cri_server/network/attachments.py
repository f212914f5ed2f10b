"""Stores, for each attached pod, the network configuration that ADD used. DEL uses this
configuration, too, even if the configuration files have changed since.

Each sandbox has one file. If its network has a foreign plugin, the file is written without a result
before the first plugin runs, and with the result after the last plugin. Both writes are synced: a
foreign plugin's address lease may survive a power cut, and only the plugin's DEL removes the lease.

If all plugins of the network are pyrunc's own, the file is written only after the last plugin. If
the server is killed before this write, GC of the next server removes what pyrunc's plugins have
left.
"""

from __future__ import annotations

import contextlib
import os
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from cni_plugins.protocol.config import NetworkList, parse_list_object
from cni_plugins.protocol.errors import CniError
from cni_plugins.protocol.result import Result
from cri_server.store.disk import records_in
from pyrunc.atomic_file import DamagedRecord, is_unwritten, read_json, remove_leftovers, write_json
from pyrunc.errors import Error, NotFound


@dataclass(frozen=True, slots=True)
class Attachment:
    """A pod and its network at the time of the ADD.

    - `netns_id`: device and inode of the network namespace.
    - `result`: the result of ADD; None while ADD runs or after it has failed.
    - `begun`: after a failed ADD, the number of plugins that were started; DEL runs for these.
      None: DEL runs for all plugins.
    """

    sandbox_id: str
    network: NetworkList
    netns_path: str
    netns_id: str
    arguments: tuple[tuple[str, str], ...]
    capabilities: dict[str, Any]
    result: Result | None = None
    begun: int | None = None

    def with_path(self, netns_path: str) -> Attachment:
        """Return a copy of the attachment, and of its result, with another path of the network
        namespace."""
        result = None if self.result is None else self.result.with_path(self.netns_path, netns_path)
        return replace(self, netns_path=netns_path, result=result)


class Attachments:
    """Stores attachments as records in one folder, which is created with mode 0700. Attachments
    that this server has added or written are also in memory. All methods but `add` and `cached`
    access the disk."""

    def __init__(self, folder: str) -> None:
        self._folder = folder
        self._cached: dict[str, Attachment] = {}  # those of this server
        if os.path.isdir(folder):
            remove_leftovers(folder)

    def has(self, sandbox_id: str) -> bool:
        """Return whether the sandbox has an attachment in memory or a record on disk, even a
        damaged one. Looks up one file name at most."""
        return sandbox_id in self._cached or os.path.exists(self._path(sandbox_id))

    def add(self, attachment: Attachment) -> None:
        """Add an attachment to memory; `write` writes its record later."""
        self._cached[attachment.sandbox_id] = attachment

    def cached(self, sandbox_id: str) -> Attachment | None:
        """Return the attachment from memory; None if this server has neither added nor written it,
        even if there is a record on disk."""
        return self._cached.get(sandbox_id)

    def write(self, attachment: Attachment) -> None:
        """Write and sync the record of an attachment, and add the attachment to memory. Raises
        OSError."""
        os.makedirs(self._folder, mode=0o700, exist_ok=True)
        result = attachment.result
        path = self._path(attachment.sandbox_id)
        write_json(
            path,
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
            durable=True,
            named_first=not os.path.exists(path),
        )
        self.add(attachment)

    def read(self, sandbox_id: str) -> Attachment | None:
        """Return the attachment in the sandbox's record; None without a record. Raises
        DamagedRecord.

        Removes an empty record and returns None. A power cut leaves an empty record only if no
        foreign plugin had run yet.
        """
        path = self._path(sandbox_id)
        try:
            record = read_json(path)
        except NotFound:
            return None
        except DamagedRecord:
            # A record without content was not synced before a power cut: no foreign plugin had run
            # yet, and pyrunc's own have no state left. Any other damaged record may be the only
            # trace of a foreign plugin's lease.
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
        """Remove the attachment from memory and its record from the disk; does nothing if there is
        none. Raises OSError."""
        self._cached.pop(sandbox_id, None)
        with contextlib.suppress(FileNotFoundError):
            os.unlink(self._path(sandbox_id))

    def all(self) -> tuple[list[Attachment], list[str]]:
        """Return all attachments, from memory and from readable records, and an error message for
        each damaged record."""
        damaged = []
        attachments = dict(self._cached)
        for sandbox_id in sorted(records_in(Path(self._folder))):
            if sandbox_id in attachments:
                continue
            try:
                attachment = self.read(sandbox_id)
            except (Error, OSError) as error:
                damaged.append(str(error))
                continue
            if attachment is not None:
                attachments[sandbox_id] = attachment
        return list(attachments.values()), damaged

    def _path(self, sandbox_id: str) -> str:
        return os.path.join(self._folder, f"{sandbox_id}.json")

"""Stores the node's pod CIDRs. kubelet sends them once (UpdateRuntimeConfig), and a restarted
server needs them before kubelet sends them again."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable, Sequence
from ipaddress import ip_network as parse_network

from pyrunc.errors import Error, InvalidArgument, NotFound
from pyrunc.records import RecordFile

log = logging.getLogger(__name__)


class PodRangesFile(RecordFile):
    """The file with the pod CIDRs from kubelet. It is in the folder of the attachments' records,
    but is not read as an attachment, because its name does not end in `.json`."""

    name = "pod-ranges"
    subnets: Sequence[str]


class PodRanges:
    """The node's pod CIDRs, `subnets`, which are stored in `folder`. All methods access the
    disk."""

    def __init__(self, folder: str) -> None:
        self._folder = folder
        self.subnets = self._read()

    def replace(self, subnets: Iterable[str]) -> None:
        """Use the CIDRs `subnets` from now on, and store them. An empty list changes nothing.
        Raises InvalidArgument for a malformed CIDR.

        Raises OSError when the CIDRs cannot be stored. They are used nevertheless, and stored when
        kubelet sends them again.
        """
        parsed = parse(subnets)
        # The file is compared too: a write that failed is done again when kubelet repeats the
        # ranges.
        if not parsed or parsed == self.subnets == self._read():
            return
        self.subnets = parsed
        os.makedirs(self._folder, mode=0o700, exist_ok=True)
        PodRangesFile(parsed).write(self._folder, durable=True)

    def _read(self) -> tuple[str, ...]:
        """Return the stored CIDRs. A damaged record counts as empty, since kubelet will send the
        CIDRs again."""
        try:
            return parse(PodRangesFile.read(self._folder).subnets)
        except NotFound:
            pass
        except (Error, OSError) as error:
            path = os.path.join(self._folder, PodRangesFile.name)
            log.warning("cannot read the stored pod CIDRs: %s: %s", path, error)
        return ()


def parse(subnets: Iterable[str]) -> tuple[str, ...]:
    """Return the CIDRs in `subnets` in canonical form; skip empty strings. Raises InvalidArgument
    for a malformed CIDR."""
    try:
        return tuple(str(parse_network(subnet.strip())) for subnet in subnets if subnet.strip())
    except ValueError as error:
        raise InvalidArgument(f"pod CIDR: {error}") from None

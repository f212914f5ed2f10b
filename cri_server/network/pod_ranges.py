"""The node's pod CIDRs, which kubelet says once (UpdateRuntimeConfig) and a restarted server must
know before kubelet says them again: pods start as soon as it answers.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable, Sequence
from ipaddress import ip_network as parse_network

from pyrunc.errors import Error, InvalidArgument, NotFound
from pyrunc.records import RecordFile

log = logging.getLogger(__name__)


class PodRangesFile(RecordFile):
    """What kubelet said. Its name is without the ending of the attachments' records beside it."""

    name = "pod-ranges"
    subnets: Sequence[str]


class PodRanges:
    """The ranges as remembered in `folder`. All methods touch the disk."""

    def __init__(self, folder: str) -> None:
        self._folder = folder
        self.subnets = self._read()

    def replace(self, subnets: Iterable[str]) -> None:
        """Use and remember `subnets`, written as prefixes; none at all changes nothing. Raises
        InvalidArgument, OSError: what could not be remembered is used all the same, and remembered
        when it is said again.
        """
        wanted = parse(subnets)
        if not wanted or wanted == self.subnets == self._read():
            return
        self.subnets = wanted
        os.makedirs(self._folder, mode=0o700, exist_ok=True)
        PodRangesFile(wanted).write(self._folder, durable=True)

    def _read(self) -> tuple[str, ...]:
        """What is remembered; a damaged record is as good as none, since kubelet will say it again."""
        try:
            return parse(PodRangesFile.read(self._folder).subnets)
        except NotFound:
            pass
        except (Error, OSError) as error:
            path = os.path.join(self._folder, PodRangesFile.name)
            log.warning("the node's pod CIDRs are forgotten: %s: %s", path, error)
        return ()


def parse(subnets: Iterable[str]) -> tuple[str, ...]:
    """`subnets` in the usual form, without empty ones. Raises InvalidArgument."""
    try:
        return tuple(str(parse_network(subnet.strip())) for subnet in subnets if subnet.strip())
    except ValueError as error:
        raise InvalidArgument(f"pod CIDR: {error}") from None

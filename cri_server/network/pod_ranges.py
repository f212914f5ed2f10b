"""The node's pod CIDRs, which kubelet says once (UpdateRuntimeConfig) and a restarted server must know before kubelet says
them again: pods start as soon as it answers.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable
from ipaddress import ip_network as parse_network

from pyrunc.atomic_file import DamagedRecord, read_json, write_json
from pyrunc.errors import InvalidArgument, NotFound

log = logging.getLogger(__name__)

_NAME = "pod-ranges"
"""Without the ending of the attachments' records beside it."""


class PodRanges:
    """The ranges as remembered in `folder`. All methods touch the disk."""

    def __init__(self, folder: str) -> None:
        self._folder = folder
        self.subnets = self._read()

    def replace(self, subnets: Iterable[str]) -> None:
        """Use and remember `subnets`, written as prefixes; none at all changes nothing. Raises InvalidArgument, OSError:
        what could not be remembered is used all the same, and remembered when it is said again.
        """
        wanted = parse(subnets)
        if not wanted or wanted == self.subnets == self._read():
            return
        self.subnets = wanted
        os.makedirs(self._folder, mode=0o700, exist_ok=True)
        write_json(self._path, {"subnets": list(wanted)}, durable=True)

    @property
    def _path(self) -> str:
        return os.path.join(self._folder, _NAME)

    def _read(self) -> tuple[str, ...]:
        """What is remembered; a damaged record is as good as none, since kubelet will say it again."""
        try:
            return parse(read_json(self._path)["subnets"])
        except NotFound:
            pass
        except (DamagedRecord, InvalidArgument, KeyError, TypeError, AttributeError, OSError) as error:
            log.warning("the node's pod CIDRs are forgotten: %s: %s", self._path, error)
        return ()


def parse(subnets: Iterable[str]) -> tuple[str, ...]:
    """`subnets` in the usual form, without empty ones. Raises InvalidArgument."""
    try:
        return tuple(str(parse_network(subnet.strip())) for subnet in subnets if subnet.strip())
    except ValueError as error:
        raise InvalidArgument(f"pod CIDR: {error}") from None

"""Leases: who has which address, as files in the network's folder, changed only under its lock.

    <address>             JSON {owner, boot, link}: taken; `owner` is empty once released, while `link` may still exist
    owners/<owner>        JSON {addresses, boot}: written before the leases, removed after them, so that a kill in
                          between leaves nothing that DEL cannot find
    last_reserved_ip.<n>  where range set n goes on (round robin), as the reference writes it
    lock                  flock(2)

A lease of another boot is void: its pod cannot live (kernel.random.boot_id). A released address is not handed out while
its veth still exists, because the kernel tears links down in the background and would mix up two pods.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from ipaddress import ip_address as parse_address
from typing import Any

from cni_plugins.host_local.ranges import Address, Range, RangeSet
from cni_plugins.protocol.errors import IO_FAILURE, NO_ADDRESS_LEFT, CniError
from pyrunc.record import write_bytes

_PROBES_BEFORE_LISTING = 32
_OWNER_NAME_LIMIT = 200


@dataclass(frozen=True, slots=True)
class Lease:
    """One address and the range that it came from."""

    address: Address
    range: Range


class Leases:
    """The leases of one network; use through `opened`, which holds the lock."""

    def __init__(self, folder: str, boot: str, link_exists: Callable[[str], bool]) -> None:
        self._folder, self._boot, self._link_exists = folder, boot, link_exists

    def take(
        self, owner: str, sets: tuple[RangeSet, ...], requested: tuple[Address, ...], link: str
    ) -> list[Lease]:
        """One address of each set for `owner`; all or none. `link` is the host's interface that must be gone before reuse.

        Raises CniError 110 when a set is used up, 7 when `owner` has addresses already or a requested one is taken.
        """
        if self.addresses_of(owner):
            raise CniError(IO_FAILURE, f"{owner} has addresses already")
        chosen = [self._choose(index, each, requested) for index, each in enumerate(sets)]
        self._write_owner(owner, [str(lease.address) for lease in chosen])
        for index, lease in enumerate(chosen):
            self._write(str(lease.address), {"owner": owner, "boot": self._boot, "link": link})
            self._write_text(f"last_reserved_ip.{index}", str(lease.address))
        return chosen

    def release(self, owner: str) -> list[str]:
        """Give back what `owner` has; returns the addresses. Nothing to do is no error."""
        addresses = self.addresses_of(owner)
        for address in addresses:
            lease = self._read(address)
            if lease.get("owner") != owner:
                continue
            if lease.get("link") and self._link_exists(str(lease["link"])):
                self._write(address, {**lease, "owner": ""})
            else:
                self._remove(address)
        self._remove(_owner_path(owner))
        return addresses

    def addresses_of(self, owner: str) -> list[str]:
        """What `owner` has in this boot."""
        record = self._read(_owner_path(owner))
        addresses = record.get("addresses")
        return addresses if isinstance(addresses, list) and record.get("boot") == self._boot else []

    def owner_of(self, address: str) -> str:
        lease = self._read(address)
        return str(lease.get("owner", "")) if lease.get("boot") == self._boot else ""

    def collect(self, valid: Callable[[str], bool]) -> list[str]:
        """Release what belongs to owners that are not valid, drop what is void; returns the owners that lost something."""
        lost = []
        for name in self._names("owners"):
            record = self._read(f"owners/{name}")
            owner = str(record.get("owner", ""))
            if record.get("boot") != self._boot or not valid(owner):
                self.release(owner) if owner else None
                self._remove(f"owners/{name}")
                lost.append(owner or name)
        for name in self._address_files():
            lease = self._read(name)
            orphan = bool(lease.get("owner")) and name not in self.addresses_of(str(lease["owner"]))
            if orphan or self._free(name):
                self._remove(name)
        return lost

    def _choose(self, index: int, each: RangeSet, requested: tuple[Address, ...]) -> Lease:
        wanted = next((address for address in requested if address in each), None)
        if wanted is not None:
            found = each.range_of(wanted)
            assert found is not None
            if wanted == found.gateway:
                raise CniError(IO_FAILURE, f"the requested address {wanted} is the gateway's")
            if not self._free(str(wanted)):
                raise CniError(IO_FAILURE, f"the requested address {wanted} is taken")
            return Lease(wanted, found)
        return self._next_free(index, each)

    def _next_free(self, index: int, each: RangeSet) -> Lease:
        """Round robin. The first probes look at single files; in a crowded range the folder is listed once."""
        taken: set[str] | None = None
        for probe, (address, found) in enumerate(each.after(self._last(index))):
            name = str(address)
            if probe == _PROBES_BEFORE_LISTING:
                taken = {n for n in self._address_files() if not self._free(n)}
            if name not in taken if taken is not None else self._free(name):
                return Lease(address, found)
        subnets = ", ".join(str(r.subnet) for r in each.ranges)
        raise CniError(NO_ADDRESS_LEFT, f"no address left in {subnets} ({each.size} in all)")

    def _free(self, name: str) -> bool:
        """Whether the address has no lease, a void one, or a released one whose link is gone."""
        lease = self._read(name)
        if not lease or lease.get("boot") != self._boot:
            return True
        return not lease.get("owner") and not self._link_exists(str(lease.get("link", "")))

    def _last(self, index: int) -> Address | None:
        try:
            with open(f"{self._folder}/last_reserved_ip.{index}", "rb") as file:
                return parse_address(file.read(64).decode("ascii").strip())
        except (FileNotFoundError, ValueError):
            return None

    def _write_owner(self, owner: str, addresses: list[str]) -> None:
        os.makedirs(f"{self._folder}/owners", mode=0o755, exist_ok=True)
        self._write(_owner_path(owner), {"owner": owner, "addresses": addresses, "boot": self._boot})

    def _write(self, name: str, value: dict[str, Any]) -> None:
        self._write_text(name, json.dumps(value))

    def _write_text(self, name: str, text: str) -> None:
        write_bytes(f"{self._folder}/{name}", text.encode(), mode=0o600)

    def _read(self, name: str) -> dict[str, Any]:
        """The record, or an empty one where it is missing or damaged: nobody can be its owner then."""
        try:
            with open(f"{self._folder}/{name}", "rb", buffering=0) as file:
                value = json.loads(file.read(65536) or b"{}")
        except FileNotFoundError:
            return {}
        except ValueError:
            return {}
        return value if isinstance(value, dict) else {}

    def _remove(self, name: str) -> None:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(f"{self._folder}/{name}")

    def _names(self, below: str) -> list[str]:
        try:
            return sorted(n for n in os.listdir(f"{self._folder}/{below}") if not n.endswith(".tmp"))
        except FileNotFoundError:
            return []

    def _address_files(self) -> list[str]:
        return [n for n in self._names("") if (n[0].isdigit() or ":" in n) and _is_address(n)]


@contextlib.contextmanager
def opened(folder: str, link_exists: Callable[[str], bool], *, boot: str | None = None) -> Iterator[Leases]:
    """The leases below `folder` with the lock held. Raises CniError 5."""
    try:
        os.makedirs(folder, mode=0o755, exist_ok=True)
        lock = os.open(f"{folder}/lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield Leases(folder, boot if boot is not None else boot_id(), link_exists)
        finally:
            os.close(lock)
    except OSError as error:
        raise CniError(IO_FAILURE, f"leases in {folder}: {error.strerror or error}") from None


def boot_id() -> str:
    with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
        return file.read().strip()


def owner_name(container_id: str, ifname: str) -> str:
    """The owner of an attachment's leases: no container id holds a slash."""
    return f"{container_id}/{ifname}"


def _owner_path(owner: str) -> str:
    name = owner.replace("/", "@")
    if len(name) > _OWNER_NAME_LIMIT:
        name = hashlib.sha256(owner.encode()).hexdigest()
    return f"owners/{name}"


def _is_address(name: str) -> bool:
    try:
        parse_address(name)
    except ValueError:
        return False
    return True

"""Leases: who has which address, as files in the network's folder, changed only under its lock.

    <address>             JSON {owner, boot, link}: taken
    leaving/<address>     JSON {boot, link}: released, but the pod's veth still exists
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
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from ipaddress import ip_address as parse_address
from typing import Any

from cni_plugins.host_local.ranges import Address, Range, RangeSet
from cni_plugins.protocol.errors import IO_FAILURE, NO_ADDRESS_LEFT, TRY_AGAIN_LATER, CniError

_PROBES_BEFORE_LISTING = 32
_OWNER_NAME_LIMIT = 200
_LAST_WIDTH = 45
_DEPARTURE_TIMEOUT_S = 1.0


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
        leaving = self._sweep()
        chosen = [self._choose(index, each, requested, leaving) for index, each in enumerate(sets)]
        self._write_owner(owner, [str(lease.address) for lease in chosen])
        for index, lease in enumerate(chosen):
            self._write(str(lease.address), {"owner": owner, "boot": self._boot, "link": link})
            self._remember_last(index, lease.address)
        return chosen

    def release(self, owner: str) -> list[str]:
        """Give back what `owner` has; returns the addresses. Nothing to do is no error."""
        addresses = self.addresses_of(owner)
        for address in addresses:
            lease = self._read(address)
            if lease.get("owner") != owner:
                continue
            if lease.get("link") and self._link_exists(str(lease["link"])):
                os.makedirs(f"{self._folder}/leaving", mode=0o755, exist_ok=True)
                self._write(f"leaving/{address}", {"boot": self._boot, "link": lease["link"]})
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
            if not self._taken(name) or name not in self.addresses_of(str(lease["owner"])):
                self._remove(name)
        self._sweep()
        return lost

    def _choose(self, index: int, each: RangeSet, requested: tuple[Address, ...], leaving: set[str]) -> Lease:
        wanted = next((address for address in requested if address in each), None)
        if wanted is not None:
            found = each.range_of(wanted)
            assert found is not None
            if wanted == found.gateway:
                raise CniError(IO_FAILURE, f"the requested address {wanted} is the gateway's")
            if self._taken(str(wanted)):
                raise CniError(IO_FAILURE, f"the requested address {wanted} is taken")
            self._await_departure(str(wanted), leaving)
            return Lease(wanted, found)
        return self._next_free(index, each, leaving)

    def _next_free(self, index: int, each: RangeSet, leaving: set[str]) -> Lease:
        """Round robin. The first probes look at single files; in a crowded range the folder is listed once."""
        taken: set[str] | None = None
        for probe, (address, found) in enumerate(each.after(self._last(index))):
            name = str(address)
            if probe == _PROBES_BEFORE_LISTING:
                taken = {n for n in self._address_files() if self._taken(n)}
            occupied = name in taken if taken is not None else self._taken(name)
            if not occupied and name not in leaving:
                return Lease(address, found)
        for address, found in each.after(self._last(index)):
            if str(address) in leaving:
                self._await_departure(str(address), leaving)
                return Lease(address, found)
        subnets = ", ".join(str(r.subnet) for r in each.ranges)
        raise CniError(NO_ADDRESS_LEFT, f"no address left in {subnets} ({each.size} in all)")

    def _taken(self, name: str) -> bool:
        """Whether the address has a lease of this boot."""
        lease = self._read(name)
        return bool(lease.get("owner")) and lease.get("boot") == self._boot

    def _sweep(self) -> set[str]:
        """Forget released addresses whose links are gone; returns the others."""
        return {name for name in self._names("leaving") if not self._departed(name)}

    def _departed(self, name: str) -> bool:
        record = self._read(f"leaving/{name}")
        if record.get("boot") == self._boot and self._link_exists(str(record.get("link", ""))):
            return False
        self._remove(f"leaving/{name}")
        return True

    def _await_departure(self, name: str, leaving: set[str]) -> None:
        """Nothing else is left: give the kernel a moment to remove the link. Raises CniError 11."""
        deadline = time.monotonic() + _DEPARTURE_TIMEOUT_S
        while name in leaving and not self._departed(name):
            if time.monotonic() > deadline:
                raise CniError(TRY_AGAIN_LATER, f"{name} is released, but its old interface still exists")
            time.sleep(0.01)

    def _last(self, index: int) -> Address | None:
        try:
            with open(f"{self._folder}/last_reserved_ip.{index}", "rb") as file:
                return parse_address(file.read(64).decode("ascii").strip())
        except (FileNotFoundError, ValueError):
            return None

    def _remember_last(self, index: int, address: Address) -> None:
        """Overwritten in place, padded: a rename onto an existing file makes ext4 allocate and flush at once (5 ms)."""
        path = f"{self._folder}/last_reserved_ip.{index}"
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        try:
            os.pwrite(descriptor, str(address).ljust(_LAST_WIDTH).encode() + b"\n", 0)
        finally:
            os.close(descriptor)

    def _write_owner(self, owner: str, addresses: list[str]) -> None:
        os.makedirs(f"{self._folder}/owners", mode=0o755, exist_ok=True)
        self._write(_owner_path(owner), {"owner": owner, "addresses": addresses, "boot": self._boot})

    def _write(self, name: str, value: dict[str, Any]) -> None:
        self._write_text(name, json.dumps(value))

    def _write_text(self, name: str, text: str) -> None:
        """Whole or not at all: written under another name, then renamed. The lock makes the name ours."""
        temporary = f"{self._folder}/write.tmp"
        descriptor = os.open(
            temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600
        )
        try:
            os.write(descriptor, text.encode())
        finally:
            os.close(descriptor)
        os.rename(temporary, f"{self._folder}/{name}")

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

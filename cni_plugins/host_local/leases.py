"""Leases: files in the network's folder that name the owner of each address. They are written only
under the folder's lock.

    <address>             a lease: `container id CR LF interface`, in the reference plugin's format
    owners/<owner>        the addresses of an owner: JSON {owner, addresses, boot, link, scope}
    leaving/<address>     a released address whose veth still existed: JSON {boot, link}
    last_reserved_ip.<n>  the last address assigned from range set n: the next search starts there
    lock                  flock(2)

- `boot`: the kernel's boot id (kernel.random.boot_id).
- `link`: the name of the pod's veth on the host.
- `scope`: the name of the runtime that owns the lease.

This plugin and the reference plugin can read each other's leases. The file of an owner is written
before its leases and removed after them, so that DEL finds every lease even if the plugin is killed
in between.

A lease of an earlier boot is void, because its pod is gone. Files need no sync, because a power cut
makes all leases of this plugin void. A crash may leave an empty file in `owners/`. GC then removes
all leases of that owner. A lease of the reference plugin has no boot id and stays until it is
released.

A released address is not assigned while the veth of its last pod exists. The kernel removes links
in the background, and the bridge would confuse the two pods.
"""

from __future__ import annotations

import contextlib
import fcntl
import functools
import hashlib
import json
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from ipaddress import ip_address as parse_address
from typing import TYPE_CHECKING

from cni_plugins.host_local.ranges import Range, RangeSet
from cni_plugins.protocol.addresses import Address
from cni_plugins.protocol.errors import IO_FAILURE, NO_ADDRESS_LEFT, TRY_AGAIN_LATER, CniError
from pyrunc.errors import InvalidArgument
from pyrunc.kernel.fd import close_all, closing_fd
from pyrunc.records import Record

if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import TypeVar

    StoredRecord = TypeVar("StoredRecord", bound=Record)

_PROBES_BEFORE_LISTING = 32
# NAME_MAX is 255; a container id alone may have 255 characters (`check_identifier`).
_OWNER_NAME_LIMIT = 200
_LAST_WIDTH = 45
_LINK_TIMEOUT_S = 1.0
# ADD checks a file in `leaving/` only when it is about to assign the file's address. The sweep
# limits the number of the other files.
_SWEEP_EVERY = 16
"""About one in this many releases checks all files in `leaving/`: the release of an address that,
as an integer, is a multiple of this number."""


@dataclass(frozen=True, slots=True)
class Lease:
    """A leased address, and the range that contains it."""

    address: Address
    range: Range


class OwnerRecord(Record):
    """The content of `owners/OWNER`.

    - `boot`: the id of the boot in which the addresses were leased.
    - `link`: the veth that must be gone before the addresses are reused.
    - `scope`: the runtime that owns the leases.
    """

    owner: str
    addresses: Sequence[str]
    boot: str
    link: str = ""
    scope: str = ""


class LeavingRecord(Record):
    """The content of `leaving/ADDRESS`. `link`: the link that must be gone before the address is
    reused."""

    boot: str
    link: str = ""


class NetworkLeases:
    """The leases of one network. Only `open_leases` creates such an object, and it holds the
    network's lock while the caller uses the object."""

    def __init__(self, folder: str, boot: str, link_exists: Callable[[str], bool]) -> None:
        self._folder, self._boot, self._link_exists = folder, boot, link_exists
        self._last_files: dict[int, int] = {}

    def close(self) -> None:
        close_all(self._last_files.values())
        self._last_files.clear()

    def take(
        self,
        owner: str,
        sets: tuple[RangeSet, ...],
        requested: tuple[Address, ...],
        *,
        link: str = "",
        scope: str = "",
    ) -> list[Lease]:
        """Lease one address of each set for `owner` (`container id/interface`). If one set has no
        free address, lease no address at all.

        - `link`: the host interface that must be gone before the addresses are reused
        - `scope`: the runtime whose `collect` may release the addresses

        Raises CniError:

        - NO_ADDRESS_LEFT if a set is exhausted
        - TRY_AGAIN_LATER if the veth of an address's last pod still exists
        - IO_FAILURE if `owner` already has addresses, or a requested address is leased or is a
          gateway
        """
        if any(self._owner_in(address) == owner for address in self.addresses_of(owner)):
            raise CniError(IO_FAILURE, f"attachment {owner} already has addresses")
        leases = [self._choose(index, each, requested) for index, each in enumerate(sets)]
        addresses = [str(lease.address) for lease in leases]
        # The record comes before the leases, so that DEL finds all of them after a kill in between.
        record = OwnerRecord(owner, addresses, self._boot, link, scope)
        self._write(_owner_path(owner), json.dumps(record.to_fields()))
        for index, lease in enumerate(leases):
            # The reference plugin separates id and interface by CR LF on Linux too (backend/disk,
            # LineBreak).
            self._write(str(lease.address), owner.replace("/", "\r\n"))
            self._write_last(index, lease.address)
        return leases

    def release(self, owner: str) -> list[str]:
        """Release the addresses of `owner`, also those of an earlier boot, and return them; an
        empty list if there are none."""
        record = self._record(_owner_path(owner), OwnerRecord)
        # The reference plugin writes no file in `owners/`.
        recorded = record.addresses if record else self._address_files()
        addresses = [name for name in recorded if self._owner_in(name) == owner]
        for address in addresses:
            self._release_address(address, record.link if record else "")
        self._remove(_owner_path(owner))
        if any(int(parse_address(address)) % _SWEEP_EVERY == 0 for address in addresses):
            self._sweep()
        return addresses

    def addresses_of(self, owner: str) -> list[str]:
        """Return the addresses in the file of `owner`; an empty list if the file does not exist, or
        is of an earlier boot."""
        record = self._record(_owner_path(owner), OwnerRecord)
        return [*record.addresses] if record and record.boot == self._boot else []

    def owner_of(self, address: str) -> str:
        """Return the owner of the address; empty if the address is free."""
        owner = self._owner_in(address)
        if not owner or not self._exists(_owner_path(owner)):
            return owner
        record = self._record(_owner_path(owner), OwnerRecord)
        return owner if record and record.boot == self._boot else ""

    def collect(self, valid: Callable[[str], bool], *, scope: str = "") -> list[str]:
        """Release the leases of previous boots, and the leases of owners for which `valid` returns
        False. Return the owners whose files were removed; for a damaged file, the file's name.

        `scope`: the name of the calling runtime. This boot's leases of other runtimes on the same
        network are kept. Empty: the leases of all runtimes may be released."""
        losers = []
        for name in self._names("owners"):
            path = f"owners/{name}"
            record = self._record(path, OwnerRecord)
            if record is None:
                self._drop_damaged(path)
            elif record.boot != self._boot or not (
                (scope and record.scope != scope) or valid(record.owner)
            ):
                self._drop(record)
            else:
                continue
            self._remove(path)
            losers.append(record.owner if record else name)
        for name in self._address_files():
            owner = self.owner_of(name)
            recorded = bool(owner) and self._record(_owner_path(owner), OwnerRecord) is not None
            orphan = recorded and name not in self.addresses_of(owner)
            # A lease without a record was made by the reference plugin and has no scope, so a
            # server's GC, which has one, keeps it.
            if not owner or orphan or not (recorded or scope or valid(owner)):
                self._remove(name)
        self._sweep()
        return losers

    def _drop(self, record: OwnerRecord) -> None:
        """Release the addresses in the owner's file `record`. An address that another owner has
        leased since then is kept."""
        for address in record.addresses:
            if self._owner_in(address) == record.owner:
                self._release_address(address, record.link)

    def _drop_damaged(self, path: str) -> None:
        """Remove all leases of the owner whose file `path` is damaged. Reads every lease to find
        these, because only the damaged file listed them."""
        for address in self._address_files():
            if _owner_path(self._owner_in(address)) == path:
                self._remove(address)

    def _release_address(self, address: str, link: str) -> None:
        # The kernel removes a closed namespace's links 15 to 30 ms later; a new pod with this
        # address, and so with this hardware address, would share the bridge with the previous one.
        if self._link_exists(link):
            self._write(
                f"leaving/{address}", json.dumps(LeavingRecord(self._boot, link).to_fields())
            )
        self._remove(address)

    def _choose(self, index: int, each: RangeSet, requested: tuple[Address, ...]) -> Lease:
        requested_address = next((address for address in requested if address in each), None)
        if requested_address is not None:
            address_range = each.range_of(requested_address)
            assert address_range is not None
            # The bridge may have this address: the pod would answer for the gateway of all others.
            if requested_address == address_range.gateway:
                raise CniError(
                    IO_FAILURE, f"the requested address {requested_address} is the gateway"
                )
            if self._taken(str(requested_address)):
                raise CniError(IO_FAILURE, f"the requested address {requested_address} is taken")
            self._wait_for_link(str(requested_address))
            return Lease(requested_address, address_range)
        return self._next_free(index, each)

    def _next_free(self, index: int, each: RangeSet) -> Lease:
        """Return the next free address of range set number `index`, round robin. Raises CniError
        NO_ADDRESS_LEFT if every address is leased. Raises CniError TRY_AGAIN_LATER if, for each
        free address, the veth of its last pod still exists."""
        leased: set[str] | None = None
        leaving: Lease | None = None
        for probe, (address, address_range) in enumerate(each.after(self._last(index))):
            name = str(address)
            if probe == _PROBES_BEFORE_LISTING:
                leased = {n for n in self._address_files() if self._taken(n)}
            occupied = name in leased if leased is not None else self._taken(name)
            if occupied:
                continue
            if not self._exists(f"leaving/{name}") or self._is_link_gone(name):
                return Lease(address, address_range)
            leaving = leaving or Lease(address, address_range)
        if leaving is not None:
            self._wait_for_link(str(leaving.address))
            return leaving
        subnets = ", ".join(str(r.subnet) for r in each.ranges)
        raise CniError(NO_ADDRESS_LEFT, f"no address left in {subnets} ({each.size} in total)")

    def _taken(self, name: str) -> bool:
        return bool(self.owner_of(name))

    def _sweep(self) -> None:
        """Remove the files in `leaving/` whose veths no longer exist."""
        for name in self._names("leaving"):
            self._is_link_gone(name)

    def _is_link_gone(self, name: str) -> bool:
        record = self._record(f"leaving/{name}", LeavingRecord)
        if record and record.boot == self._boot and self._link_exists(record.link):
            return False
        self._remove(f"leaving/{name}")
        return True

    def _wait_for_link(self, name: str) -> None:
        """Wait until the kernel has removed the veth of the last pod with the address `name`.
        Raises CniError TRY_AGAIN_LATER after 1 s."""
        deadline = time.monotonic() + _LINK_TIMEOUT_S
        while self._exists(f"leaving/{name}") and not self._is_link_gone(name):
            if time.monotonic() > deadline:
                raise CniError(
                    TRY_AGAIN_LATER,
                    f"address {name} is released, but its previous interface still exists",
                )
            time.sleep(0.01)

    def _last(self, index: int) -> Address | None:
        try:
            return parse_address(os.pread(self._last_file(index), 64, 0).decode("ascii").strip())
        except ValueError:
            return None

    def _write_last(self, index: int, address: Address) -> None:
        """Store `address` as the last one assigned from range set number `index`."""
        # A rename onto an existing file would make ext4 allocate and flush at once, which takes
        # 5 ms (ext4(5), auto_da_alloc).
        os.pwrite(self._last_file(index), str(address).ljust(_LAST_WIDTH).encode() + b"\n", 0)

    def _last_file(self, index: int) -> int:
        descriptor = self._last_files.get(index)
        if descriptor is None:
            path = f"{self._folder}/last_reserved_ip.{index}"
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
            self._last_files[index] = descriptor
        return descriptor

    def _write(self, name: str, text: str) -> None:
        """Replace the file `name` atomically. The caller must hold the lock, because all calls use
        the same temporary file."""
        temporary = f"{self._folder}/write.tmp"
        with closing_fd(
            os.open(
                temporary,
                os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC | os.O_NOFOLLOW,
                0o600,
            )
        ) as descriptor:
            os.write(descriptor, text.encode())
        try:
            os.rename(temporary, f"{self._folder}/{name}")
        except FileNotFoundError:
            os.makedirs(os.path.dirname(f"{self._folder}/{name}"), mode=0o755, exist_ok=True)
            os.rename(temporary, f"{self._folder}/{name}")

    def _read(self, name: str) -> bytes:
        try:
            descriptor = os.open(
                f"{self._folder}/{name}", os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW
            )
        except FileNotFoundError:
            return b""
        with closing_fd(descriptor):
            return os.read(descriptor, 65536)

    def _exists(self, name: str) -> bool:
        return os.path.lexists(f"{self._folder}/{name}")

    def _record(self, name: str, kind: type[StoredRecord]) -> StoredRecord | None:
        """Read the JSON file `name` as a record of the class `kind`; return None if the file is
        missing or damaged."""
        try:
            return kind.of(json.loads(self._read(name)))
        except (
            ValueError,
            AttributeError,
            InvalidArgument,
        ):  # not JSON, not an object, or other fields
            return None

    def _owner_in(self, name: str) -> str:
        """Return the owner in the lease `name`; empty if the file is missing or damaged. In old
        leases of the reference plugin, which name no interface, the owner is the container id."""
        words = self._read(name).decode("utf-8", "replace").split()
        return "/".join(words) if 0 < len(words) <= 2 else ""

    def _remove(self, name: str) -> None:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(f"{self._folder}/{name}")

    def _names(self, below: str) -> list[str]:
        try:
            return sorted(
                n for n in os.listdir(f"{self._folder}/{below}") if not n.endswith(".tmp")
            )
        except FileNotFoundError:
            return []

    def _address_files(self) -> list[str]:
        return [n for n in self._names("") if (n[0].isdigit() or ":" in n) and _is_address(n)]


@contextlib.contextmanager
def open_leases(
    folder: str, link_exists: Callable[[str], bool], *, boot: str | None = None
) -> Iterator[NetworkLeases]:
    """Yield the leases in `folder` while holding the network's lock. Creates a missing folder.
    Raises CniError IO_FAILURE if a file in `folder` cannot be used.

    - `link_exists`: returns whether the host has a link of this name
    - `boot`: the boot id; None for the boot id of the running kernel
    """
    try:
        try:
            lock = _open_lock(folder)
        except FileNotFoundError:
            os.makedirs(folder, mode=0o755, exist_ok=True)
            lock = _open_lock(folder)
        leases = NetworkLeases(folder, boot if boot is not None else boot_id(), link_exists)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield leases
        finally:
            leases.close()
            os.close(lock)
    except OSError as error:
        raise CniError(
            IO_FAILURE, f"cannot use the leases in {folder}: {error.strerror or error}"
        ) from None


def _open_lock(folder: str) -> int:
    return os.open(f"{folder}/lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)


@functools.cache
def boot_id() -> str:
    with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
        return file.read().strip()


def owner_name(container_id: str, ifname: str) -> str:
    """Return the name under which an attachment owns leases, `container id/interface`. It is
    unique, because container ids contain no slash."""
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

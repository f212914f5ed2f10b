"""Loads device filters, which are eBPF programs of the kernel, and attaches them to cgroups by
bpf(2).

Source: bpf(2), include/uapi/linux/bpf.h. The kernel keeps a filter as long as it is attached, so
its descriptor is closed here at once. The kernel allows an access only if all filters of a group
allow it, so a filter with new rules replaces the earlier one.
"""

from __future__ import annotations

import os
import struct

from pyrunc.errors import KernelError
from pyrunc.kernel import call
from pyrunc.kernel.fd import closing_fd

PROG_LOAD, PROG_ATTACH, PROG_DETACH, PROG_GET_FD_BY_ID, PROG_QUERY = 5, 8, 9, 13, 16
TYPE_CGROUP_DEVICE, ATTACH_CGROUP_DEVICE = 15, 6
F_ALLOW_MULTI, F_REPLACE = 2, 4
# A kernel whose union is shorter takes this one if the rest is zero (bpf_check_uarg_tail_zero), so
# one size suits all versions.
ATTRIBUTES_SIZE = 128
# BPF_CGROUP_MAX_PROGS of kernel/bpf/cgroup.c: a group cannot have more filters of one kind.
MAX_ATTACHED = 64
INSTRUCTION = struct.Struct("<BBhi")
NAME = b"pyrunc_devices"


_cached: dict[bytes, int] | None = None
# Loading and verifying a filter takes two thirds of the making of a cgroup (0.6 of 0.9 ms), and
# most containers of a machine have the same device rules.
_CACHED_AT_MOST = 16


def cache_programs() -> None:
    """Make this process keep the descriptors of loaded device filters. It then loads and verifies
    the same rules only once, not again for each group. This suits a process that makes many
    groups."""
    global _cached
    _cached = {}


def replace_device_program(group_fd: int, program: bytes) -> None:
    """Make `program` (eBPF instructions) the only device filter of the group. Raises KernelError
    with the verifier's log."""
    new = _open_cached(program) if _cached is not None else open_device_program(program)
    try:
        old = _attached(group_fd)
        if len(old) == 1 and _attach_instead(group_fd, new, old[0]):
            return
        # The new filter first: meanwhile both must allow an access, so the group is never without
        # a filter. A group whose filters were attached with other flags refuses this one (EPERM).
        _attach(group_fd, new, F_ALLOW_MULTI, 0)
        for number in old:
            _detach(group_fd, number)
    finally:
        if _cached is None or _cached.get(program) != new:
            os.close(new)


def _open_cached(program: bytes) -> int:
    assert _cached is not None
    descriptor = _cached.get(program)
    if descriptor is None:
        descriptor = open_device_program(program)
        if len(_cached) < _CACHED_AT_MOST:
            _cached[program] = descriptor
    return descriptor


def open_device_program(program: bytes) -> int:
    """Load and verify the device filter `program` (eBPF instructions). Returns its descriptor,
    which the caller closes. Raises KernelError."""
    code = call.buffer(program)
    count = len(program) // INSTRUCTION.size
    try:
        # Without a log: the verifier would write each step of a correct filter into it.
        return _load(code, count, None)
    except KernelError as error:
        log = call.buffer(65536)
        try:
            return _load(code, count, log)
        except KernelError:
            words = log.partition(b"\0")[0].decode("utf-8", "replace").strip().replace("\n", "; ")
            raise KernelError("bpf", "load of the device filter", error.errno, words) from None


def _load(code: bytearray, count: int, log: bytearray | None) -> int:
    # The verifier wants a licence compatible with the GPL only of eBPF programs that call certain
    # helpers; a device filter calls none.
    licence = call.buffer(b"Apache-2.0\0")
    instructions = (TYPE_CGROUP_DEVICE, count, call.address(code), call.address(licence))
    log_buffer = (0, 0, 0) if log is None else (1, len(log), call.address(log))
    attributes = struct.pack("<IIQQIIQII16sII", *instructions, *log_buffer, 0, 0, NAME, 0, 0)
    return _bpf(PROG_LOAD, attributes, "load of the device filter")[0]


def _attached(group_fd: int) -> list[int]:
    ids = call.buffer(4 * MAX_ATTACHED)
    attributes = struct.pack(
        "<IIIIQI", group_fd, ATTACH_CGROUP_DEVICE, 0, 0, call.address(ids), MAX_ATTACHED
    )
    _, answer = _bpf(PROG_QUERY, attributes, "query of the device filters")
    (count,) = struct.unpack_from("<I", answer, 24)
    return list(struct.unpack_from(f"<{count}I", ids))


def _attach_instead(group_fd: int, new: int, old_id: int) -> bool:
    """Replace the attached filter with the id `old_id` by the filter `new` in one step
    (BPF_F_REPLACE). False when the kernel refuses, for example because the old filter was attached
    with other flags."""
    try:
        with closing_fd(_open_by_id(old_id)) as old:
            # BPF_F_REPLACE (Linux 5.6) swaps in one step, so the group is never without a filter.
            _attach(group_fd, new, F_ALLOW_MULTI | F_REPLACE, old)
    except KernelError:
        return False
    return True


def _attach(group_fd: int, program_fd: int, flags: int, replaced_fd: int) -> None:
    attributes = struct.pack(
        "<IIIII", group_fd, program_fd, ATTACH_CGROUP_DEVICE, flags, replaced_fd
    )
    _bpf(PROG_ATTACH, attributes, "attach of the device filter to the cgroup")


def _detach(group_fd: int, program_id: int) -> None:
    with closing_fd(_open_by_id(program_id)) as program:
        attributes = struct.pack("<IIII", group_fd, program, ATTACH_CGROUP_DEVICE, 0)
        _bpf(PROG_DETACH, attributes, "detach of the earlier device filter")


def _open_by_id(program_id: int) -> int:
    attributes = struct.pack("<III", program_id, 0, 0)
    return _bpf(PROG_GET_FD_BY_ID, attributes, f"program {program_id}")[0]


def _bpf(command: int, attributes: bytes, subject: str) -> tuple[int, bytes]:
    # A buffer, because the kernel also writes into the union (the count of a query).
    union = call.buffer(attributes.ljust(ATTRIBUTES_SIZE, b"\0"))
    return call.syscall("bpf", subject, command, union, ATTRIBUTES_SIZE), bytes(union)

"""Compiles seccomp filters by libseccomp through ctypes, and tests which flags of seccomp(2) the
kernel has.

libseccomp turns names of system calls into numbers, and rules into a filter of BPF instructions.
The launcher loads the filter with seccomp(2). libseccomp itself is loaded on first use, in the
process that compiles filters, never in a container. Sources: seccomp(2), the manual pages of
libseccomp 2.5.
"""

from __future__ import annotations

import ctypes
import errno
import os

from pyrunc.errors import KernelError, Unsupported
from pyrunc.kernel import call
from pyrunc.kernel.fd import closing_fd

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import Any

LIBRARY = "libseccomp.so.2"
UNKNOWN_SYSCALL = -1
ATTRIBUTE_NNP, ATTRIBUTE_OPTIMIZE = 3, 8
BINARY_TREE = 2

# seccomp(2): operations and flags
SET_MODE_FILTER = 1
FLAG_NEW_LISTENER, FLAG_WAIT_KILLABLE_RECV = 8, 0x20

_library: ctypes.CDLL | None = None


class Condition(ctypes.Structure):
    """A condition of a rule (struct scmp_arg_cmp): the argument's number, the comparison, and one
    or two values."""

    _fields_ = (
        ("arg", ctypes.c_uint),
        ("op", ctypes.c_int),
        ("a", ctypes.c_uint64),
        ("b", ctypes.c_uint64),
    )


def _lib() -> ctypes.CDLL:
    global _library
    if _library is None:
        try:
            library = ctypes.CDLL(LIBRARY)
        except OSError as error:
            raise Unsupported(f"a seccomp profile needs {LIBRARY}: {error}") from None
        context, number, text = ctypes.c_void_p, ctypes.c_uint32, ctypes.c_char_p
        conditions = ctypes.POINTER(Condition)
        library.seccomp_init.restype = context
        library.seccomp_init.argtypes = [number]
        library.seccomp_release.argtypes = [context]
        library.seccomp_attr_set.argtypes = [context, ctypes.c_int, number]
        library.seccomp_arch_add.argtypes = [context, number]
        library.seccomp_arch_remove.argtypes = [context, number]
        library.seccomp_rule_add_array.argtypes = [
            context, number, ctypes.c_int, ctypes.c_uint, conditions,
        ]  # fmt: skip
        library.seccomp_syscall_resolve_name_arch.argtypes = [number, text]
        library.seccomp_syscall_resolve_name.argtypes = [text]
        library.seccomp_export_bpf.argtypes = [context, ctypes.c_int]
        _library = library
    return _library


class Compiler:
    """A context manager that builds one filter. The caller must add all architectures before the
    first rule."""

    def __init__(self, default_action: int) -> None:
        self._lib = _lib()
        self._context = self._lib.seccomp_init(default_action)
        if not self._context:
            raise KernelError("seccomp_init", f"default action {default_action:#x}", errno.EINVAL)
        self._call("seccomp_attr_set", "no NNP", ATTRIBUTE_NNP, 0)
        # Unchecked: libseccomp before 2.5 refuses it and builds a list, which is correct but
        # slower.
        # Some 300 calls take 0.10 ms to load as a tree and 0.42 as a list, because the kernel runs
        # a new filter once for each number to learn which are always allowed.
        self._lib.seccomp_attr_set(self._context, ATTRIBUTE_OPTIMIZE, BINARY_TREE)

    def __enter__(self) -> Compiler:
        return self

    def __exit__(self, *_: object) -> None:
        self._lib.seccomp_release(self._context)

    def add_architecture(self, audit: int) -> None:
        """Make the filter apply to the calls of an architecture. `audit`: AUDIT_ARCH_*, or
        libseccomp's number for x32."""
        # EEXIST: the native architecture is in every new filter.
        self._call("seccomp_arch_add", f"{audit:#x}", audit, ignored=errno.EEXIST)

    def remove_architecture(self, audit: int) -> None:
        """Remove an architecture from the filter."""
        self._call("seccomp_arch_remove", f"{audit:#x}", audit)

    def add_rule(
        self, action: int, number: int, conditions: Sequence[tuple[int, int, int, int]], name: str
    ) -> None:
        """Add a rule: `action` for the system call `number` if all `conditions` hold. A rule that
        exists already is ignored.

        - `conditions`: each (argument, comparison, value, second value)
        - `name`: the call's name, for errors
        """
        array = (Condition * len(conditions))(*(Condition(*condition) for condition in conditions))
        arguments = (action, number, len(conditions), array)
        self._call("seccomp_rule_add_array", name, *arguments, ignored=errno.EEXIST)

    def program(self) -> bytes:
        """Return the filter's classic BPF instructions (struct sock_filter, 8 bytes each)."""
        # seccomp_export_bpf_mem, which needs no file, came with libseccomp 2.6.
        with closing_fd(os.memfd_create("seccomp", os.MFD_CLOEXEC)) as file:
            self._call("seccomp_export_bpf", "", file)
            return os.pread(file, os.fstat(file).st_size, 0)

    def _call(self, function: str, subject: str, *arguments: Any, ignored: int = 0) -> None:
        """Call a function of libseccomp on the filter. Raises KernelError, except for the errno
        `ignored`."""
        code = getattr(self._lib, function)(self._context, *arguments)
        if code < 0 and code != -ignored:
            raise KernelError(function, subject, -code)


def number(name: str) -> int:
    """Return a system call's number on this architecture. If only other architectures have the
    call, the result is libseccomp's negative pseudo number. If libseccomp does not know the name,
    the result is UNKNOWN_SYSCALL."""
    return int(_lib().seccomp_syscall_resolve_name(os.fsencode(name)))


def number_on(audit: int, name: str) -> int:
    """Return a system call's number on the architecture `audit` (AUDIT_ARCH_*); negative when that
    architecture does not have the call."""
    return int(_lib().seccomp_syscall_resolve_name_arch(audit, os.fsencode(name)))


def version() -> str:
    """Return libseccomp's version, such as 2.5.4."""

    class Version(ctypes.Structure):
        _fields_ = (("major", ctypes.c_uint), ("minor", ctypes.c_uint), ("micro", ctypes.c_uint))

    library = _lib()
    library.seccomp_version.restype = ctypes.POINTER(Version)
    numbers = library.seccomp_version().contents
    return f"{numbers.major}.{numbers.minor}.{numbers.micro}"


_supported_flags: dict[int, bool] = {}


def knows_flag(flag: int) -> bool:
    """Return whether this kernel's seccomp(2) supports the flag."""
    if flag not in _supported_flags:
        # Without a program a supported flag fails with EFAULT, any other flag with EINVAL.
        # FLAG_WAIT_KILLABLE_RECV alone is EINVAL on every kernel (seccomp_set_mode_filter,
        # kernel/seccomp.c).
        flags = flag | (FLAG_NEW_LISTENER if flag == FLAG_WAIT_KILLABLE_RECV else 0)
        _supported_flags[flag] = call.raw("seccomp", SET_MODE_FILTER, flags, None) == -errno.EFAULT
    return _supported_flags[flag]

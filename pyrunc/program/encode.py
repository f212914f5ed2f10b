"""The format of a program as bytes: header, operations, relocations, data. `pause/launcher.c` reads
and checks this format.

All numbers are little-endian. The header has 32 bytes: magic, version, number of operations, number
of relocations, offset of the data, size of the data, 8 bytes of zero. An operation has 96 bytes:

    u8 kind, u8 width of what is stored, u8 relation of a compare, u8 0, u32 call number or message
    tag,
    u16 errno of rule 1..3 (0xffff: any), u16 errno to retry on,
    u32 where to store, u32 argument kinds (4 bits each), u32 skip on success / true,
    u32 skip of rule 1..3 (the first: false of a compare), u32 times to retry, u32 0, u64 arguments
    1..6

A rule is an errno and the number of operations to skip after a failure with this errno. A
relocation is the u32 offset of a word of the data. This word is itself an offset into the data; the
launcher turns it into a pointer when it loads the program. The launcher also writes into the first
eight bytes of the data: the number of the synchronisation socket (four bytes), and the address of
a signal handler that ends the process (four bytes).
"""

from __future__ import annotations

from struct import Struct

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence

MAGIC = 0x4E525950  # "PYRN"
VERSION = 1
ANY_ERRNO = 0xFFFF
HEADER = Struct("<6I8x")
OPERATION = Struct("<BBBxI4H7I4x6Q")


def encode(
    operations: Sequence[bytes], relocations: Sequence[int], data: bytes | bytearray
) -> bytes:
    """Encode the whole program. `operations` are packed with OPERATION."""
    ops = b"".join(operations)
    table = Struct(f"<{len(relocations)}I").pack(*relocations)
    start = (HEADER.size + len(ops) + len(table) + 15) & ~15
    head = HEADER.pack(MAGIC, VERSION, len(operations), len(relocations), start, len(data))
    return b"".join((head, ops, table, bytes(start - HEADER.size - len(ops) - len(table)), data))

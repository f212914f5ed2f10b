"""Tests that the protobuf encoder agrees with Google's library on the field types of CRIU's
rpc.proto, and that malformed answers of CRIU are errors."""

from __future__ import annotations

from typing import Any

import pytest
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
from hypothesis import given
from hypothesis import strategies as st

from pyrunc.checkpoint import criu
from pyrunc.checkpoint.checkpoint import CriuOptions, DumpOptions
from pyrunc.errors import InvalidArgument, PeerError

KINDS = {"bool": 8, "int32": 5, "uint32": 13, "string": 9, "bytes": 12}
FIELDS = [
    ("images_dir_fd", criu.IMAGES_DIR_FD, "int32"),
    ("pid", criu.PID, "int32"),
    ("leave_running", criu.LEAVE_RUNNING, "bool"),
    ("root", criu.ROOT, "string"),
    ("empty_ns", criu.EMPTY_NS, "uint32"),
    ("external", criu.EXTERNAL, "string"),
    ("lsm_mount_context", criu.LSM_MOUNT_CONTEXT, "bytes"),
]


def _reference() -> Any:
    """Return a message class of the protobuf library with the fields of `FIELDS`."""
    file = descriptor_pb2.FileDescriptorProto(name="options.proto", package="t", syntax="proto2")
    message = file.message_type.add(name="Options")
    for name, number, kind in FIELDS:
        message.field.add(name=name, number=number, type=KINDS[kind], label=1)  # type: ignore[arg-type]
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)  # type: ignore[no-untyped-call]
    return message_factory.GetMessageClass(pool.FindMessageTypeByName("t.Options"))


Options = _reference()


@given(
    st.integers(-(2**31), 2**31 - 1),
    st.integers(0, 2**31 - 1),
    st.booleans(),
    st.text(max_size=300).filter(lambda text: text.isprintable()),
    st.integers(0, 2**32 - 1),
    st.binary(max_size=300),
)
def test_the_library_reads_written_messages(
    fd: int, pid: int, flag: bool, text: str, unsigned: int, raw: bytes
) -> None:
    values = (fd, pid, flag, text, unsigned, f"mnt[{text}]", raw)
    encoded = criu.message(
        [(number, value) for (_, number, _), value in zip(FIELDS, values, strict=True)]
    )
    read = Options.FromString(encoded)
    assert tuple(getattr(read, name) for name, _, _ in FIELDS) == values


@given(st.integers(0, 2**31 - 1), st.booleans(), st.binary(max_size=300))
def test_messages_of_the_library_are_read(pid: int, flag: bool, raw: bytes) -> None:
    written = Options(pid=pid, leave_running=flag, lsm_mount_context=raw).SerializeToString()
    expected = {criu.PID: pid, criu.LEAVE_RUNNING: int(flag), criu.LSM_MOUNT_CONTEXT: raw}
    assert criu.decode(written) == expected


@given(st.binary(max_size=64))
def test_random_bytes_are_decoded_or_refused(content: bytes) -> None:
    try:
        criu.decode(content)
    except PeerError:
        pass


@pytest.mark.parametrize("content", [b"\x08", b"\x0a\x05ab", b"\x0b", b"\x09\x01", b"\xff" * 12])
def test_messages_that_end_too_early_are_refused(content: bytes) -> None:
    with pytest.raises(PeerError):
        criu.decode(content)


OFF = dict.fromkeys(
    (
        *(
            "tcp_established",
            "ext_unix_sk",
            "shell_job",
            "file_locks",
            "lazy_pages",
            "link_remap",
            "auto_dedup",
        ),
        *("empty_ns", "manage_cgroups_mode"),
    )
)


def choices(**values: object) -> dict[int, object]:
    return dict(CriuOptions(image_path="i", work_path="w", **{**OFF, **values}).fields())


def test_every_option_has_its_field() -> None:
    plain = choices()
    assert plain[criu.MANAGE_CGROUPS_MODE] == criu.CGROUP_MODES["soft"]
    for name, number in (
        ("tcp_established", criu.TCP_ESTABLISHED), ("ext_unix_sk", criu.EXT_UNIX_SK),
        ("shell_job", criu.SHELL_JOB), ("file_locks", criu.FILE_LOCKS),
        ("lazy_pages", criu.LAZY_PAGES), ("link_remap", criu.LINK_REMAP),
        ("auto_dedup", criu.AUTO_DEDUP), ("tcp_close", criu.TCP_CLOSE),
    ):  # fmt: skip
        assert number not in plain and choices(**{name: True})[number] is True
    assert choices(manage_cgroups_mode="strict")[criu.MANAGE_CGROUPS_MODE] == 5
    assert choices(empty_ns=("network",))[criu.EMPTY_NS] == 0x40000000
    dump = dict(DumpOptions(pre_dump=True, parent_path="../p", page_server="[::1]:99").fields())
    assert dump[criu.TRACK_MEM] is True and dump[criu.PARENT_IMG] == "../p"
    assert dump[criu.PAGE_SERVER] == criu.message([(1, "[::1]"), (2, 99)])


@pytest.mark.parametrize("wrong", [{"empty_ns": ("pid",)}, {"manage_cgroups_mode": "odd"}])
def test_invalid_options_are_refused(wrong: dict[str, object]) -> None:
    with pytest.raises(InvalidArgument):
        choices(**wrong)

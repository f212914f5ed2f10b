"""The generated CRI modules equal the table of the interface: nothing missing, nothing more,
nothing different."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from google.protobuf.descriptor import Descriptor, EnumDescriptor, FieldDescriptor

from cri_server.api import api_pb2, api_pb2_grpc

TABLE = Path(__file__).with_name("cri-v1.tsv")
Row = tuple[str, ...]
SCALARS = {
    FieldDescriptor.TYPE_DOUBLE: "double",
    FieldDescriptor.TYPE_INT64: "int64",
    FieldDescriptor.TYPE_UINT64: "uint64",
    FieldDescriptor.TYPE_INT32: "int32",
    FieldDescriptor.TYPE_UINT32: "uint32",
    FieldDescriptor.TYPE_BOOL: "bool",
    FieldDescriptor.TYPE_STRING: "string",
    FieldDescriptor.TYPE_BYTES: "bytes",
}


def listed() -> set[Row]:
    """Return the rows of `TABLE`, without empty columns."""
    lines = TABLE.read_text().splitlines()
    rows = [
        tuple(part for part in line.split("\t") if part)
        for line in lines
        if not line.startswith("#")
    ]
    assert len(rows) == len(set(rows)) > 600
    return set(rows)


def generated() -> set[Row]:
    """Return the rows that the table must have, from the descriptors that protoc generated."""
    file = api_pb2.DESCRIPTOR
    assert file.package == "runtime.v1"
    rows: set[Row] = set()
    for service in file.services_by_name.values():
        for method in service.methods:
            assert not method.client_streaming
            kind = "server_streaming" if method.server_streaming else "unary"
            rows.add(
                (
                    "rpc",
                    service.name,
                    method.name,
                    method.input_type.name,
                    method.output_type.name,
                    kind,
                )
            )
    for enum in file.enum_types_by_name.values():
        rows.update(enum_rows(enum))
    for message in file.message_types_by_name.values():
        rows.update(message_rows(message))
    return rows


def local(descriptor: Descriptor | EnumDescriptor) -> str:
    return descriptor.full_name.removeprefix("runtime.v1.")


def enum_rows(enum: EnumDescriptor) -> Iterator[Row]:
    for value in enum.values:
        yield ("enum", local(enum), value.name, str(value.number))


def message_rows(message: Descriptor) -> Iterator[Row]:
    assert not message.oneofs
    for enum in message.enum_types:
        yield from enum_rows(enum)
    assert all(nested.GetOptions().map_entry for nested in message.nested_types)
    if not message.fields:
        yield ("message", local(message))
    for field in message.fields:
        yield tuple(part for part in field_row(message, field) if part)


def field_row(message: Descriptor, field: FieldDescriptor) -> Row:
    kind, label = type_name(message, field), "repeated" if field.is_repeated else ""
    if kind.startswith("map<"):
        label = ""
    if field.GetOptions().deprecated:
        label = "deprecated"
    return ("field", local(message), field.name, str(field.number), kind, label)


def type_name(message: Descriptor, field: FieldDescriptor) -> str:
    if field.enum_type is not None:
        name = local(field.enum_type)
        return name.removeprefix(local(message) + ".")
    if field.message_type is None:
        return SCALARS[field.type]
    if field.message_type.GetOptions().map_entry:
        key = field.message_type.fields_by_name["key"]
        value = field.message_type.fields_by_name["value"]
        return f"map<{type_name(message, key)},{type_name(message, value)}>"
    return local(field.message_type)


@pytest.mark.requirement("12.4")
def test_nothing_of_the_interface_is_missing() -> None:
    assert sorted(listed() - generated()) == []


def test_nothing_is_there_that_is_not_in_the_interface() -> None:
    assert sorted(generated() - listed()) == []


def test_servicers_have_every_call() -> None:
    for service in ("RuntimeService", "ImageService"):
        calls = {row[2] for row in listed() if row[0] == "rpc" and row[1] == service}
        servicer = getattr(api_pb2_grpc, service + "Servicer")
        assert calls == {name for name in vars(servicer) if not name.startswith("_")}

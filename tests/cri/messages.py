"""Generates requests of every call from the API's descriptors: valid ones with a few changed
fields, and invalid bytes.

All randomness comes from one seeded `random.Random`, so the same seed and objects make the same
requests again.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from google.protobuf.descriptor import FieldDescriptor, MethodDescriptor

from cri_server.api import api_pb2 as api

UNKNOWN_ID = "f" * 64
# How often a call is made, where that is not 4: by its cost, and by the number of its fields.
WEIGHTS = {
    "RunPodSandbox": 4,
    "CreateContainer": 8,
    "UpdateContainerResources": 8,
    "PullImage": 0.5,
    "RemoveImage": 2,
    "GetContainerEvents": 1,
    "ExecSync": 3,
    "Status": 2,
    "StopPodSandbox": 2,
    "RemovePodSandbox": 2,
}
# Calls that end objects, which must be made again.
DESTRUCTIVE = ("StopPodSandbox", "RemovePodSandbox", "StopContainer", "RemoveContainer")
ODD_TEXTS = [
    "",
    "\0",
    ".",
    "..",
    "/../..",
    "a\nb",
    "x" * 5000,
    "/dev/null/x",
    "é",
    "%s%n",
    "-1",
    " ",
    "\U0010ffff",
    "a" * 64,
]
NUMBERS: dict[int, list[Any]] = {
    FieldDescriptor.TYPE_INT32: [0, 1, -1, 2, 999, 1000, 65535, 65536, -(2**31), 2**31 - 1],
    FieldDescriptor.TYPE_INT64: [0, 1, -1, 1000, 100000, 64 << 20, 2**32, -(2**63), 2**63 - 1],
    FieldDescriptor.TYPE_UINT32: [0, 1, 80, 65535, 65536, 2**31, 2**32 - 1],
    FieldDescriptor.TYPE_UINT64: [0, 1, 4096, 2**32, 2**63, 2**64 - 1],
    FieldDescriptor.TYPE_DOUBLE: [0.0, 0.5, -1.0, 1e308, float("nan"), float("inf")],
    FieldDescriptor.TYPE_BOOL: [True, False],
    FieldDescriptor.TYPE_BYTES: [b"", b"\0", b"\xff\xfe", b"v", b"x" * 5000],
}
# Values that pass the first check, by the field's name.
PLAUSIBLE: dict[str, list[Any]] = {
    "add_capabilities": ["ALL", "NET_ADMIN", "CAP_SYS_TIME", "cap_chown"],
    "drop_capabilities": ["ALL", "NET_RAW", "CAP_KILL"],
    "add_ambient_capabilities": ["CAP_NET_BIND_SERVICE", "ALL"],
    "permissions": ["rwm", "r", "mm"],
    "host_ip": ["127.0.0.1", "::1", "0.0.0.0", "300.0.0.1"],
    "servers": ["10.0.0.1", "fd00::1", "ns"],
    "searches": ["example.org", "a.b"],
    "options": ["ndots:5", "rw", "x=y"],
    "hostname": ["node", "a.b.c", "A-"],
    "cgroup_parent": ["", "/"],
    "working_dir": ["/", "/tmp", "/no/such", "relative"],
    "seccomp_profile_path": ["unconfined", "runtime/default", "localhost//none"],
    "apparmor_profile": ["unconfined", "runtime/default", "localhost/none"],
    "run_as_username": ["www", "root", "nobody-here", "33:33"],
    "page_size": ["2MB", "1GB", "3KB"],
    "cpuset_cpus": ["0", "0-1", "9999", "1-", "0,,1"],
    "cpuset_mems": ["0", "7"],
    "unified": [
        "memory.high",
        "cpu.weight",
        "memory.max",
        "no.such",
        "../memory.max",
        "cgroup.freeze",
        "cgroup.max.depth",
    ],
    "sysctls": [
        "net.ipv4.ip_forward",
        "kernel.shm_rmid_forced",
        "net.no.such",
        "kernel.hostname",
        "fs.mqueue.msg_max",
    ],
    "pod_cidr": ["10.88.0.0/24", "10.88.0.0/16,fd00::/64", "10.88.0.0/99"],
    "cmd": ["true", "no-such-program", "/"],
    "command": ["true", "no-such-program"],
    "localhost_ref": ["/etc/passwd", "none", "/none"],
    "user": ["u"],
    "role": ["r"],
    "type": ["t"],
    "level": ["s0:c1"],
    "log_path": ["c.log", "a/b.log", "../x.log"],
    "stop_signal": [0, 9, 15, 34, 65],
    "name": ["c", "vendor.com/class=x"],
}
Path = tuple[FieldDescriptor, ...]


@dataclass
class Things:
    """The names and ids that requests use. Most requests are about the first pod and the first
    container.

    The lists are read for each request, so tests may remove objects from them.
    """

    pods: list[str] = field(default_factory=list)
    containers: list[str] = field(default_factory=list)
    images: list[str] = field(default_factory=list)
    host_paths: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Message:
    """A request on the wire. `parsed` is None when the bytes cannot be parsed."""

    call: str
    wire: bytes
    parsed: Any


def calls() -> dict[str, MethodDescriptor]:
    """Return a dict: name -> descriptor, of all calls of RuntimeService and ImageService."""
    services = ("RuntimeService", "ImageService")
    return {m.name: m for s in services for m in api.DESCRIPTOR.services_by_name[s].methods}


class Generator:
    """Generates requests at random; `base` returns a valid request for the name of a call."""

    def __init__(self, seed: int, things: Things, base: Callable[[str], Any]) -> None:
        self._chance, self._things, self._base = random.Random(seed), things, base
        self._names, self._call = sorted(calls()), ""
        self._weights = [WEIGHTS.get(name, 4) for name in self._names]

    def __iter__(self) -> Iterator[Message]:
        while True:
            yield self.next()

    def next(self) -> Message:
        """Return the next request: 1 of 8 is valid, 1 of 25 has wrong bytes, the others have one to
        three changed fields."""
        (call,) = self._chance.choices(self._names, self._weights)
        self._call = call
        request = self._base(call)
        if self._chance.random() > 1 / 8:
            for _ in range(self._chance.choice((1, 1, 1, 2, 3))):
                self._change(request)
        wire = request.SerializeToString(deterministic=True)
        return (
            self._broken(call, request, wire)
            if self._chance.random() < 1 / 25
            else Message(call, wire, request)
        )

    def _broken(self, call: str, request: Any, wire: bytes) -> Message:
        """Return the request's message with some bytes lost, changed or inserted."""
        chance, octets = self._chance, bytearray(wire or b"\n\1a")
        for _ in range(chance.randint(1, 3)):
            at = chance.randrange(len(octets) or 1)
            match chance.randrange(3):
                case 0:
                    del octets[at:]
                case 1:
                    octets[at : at + 1] = bytes([chance.randrange(256)])
                case _:
                    octets[at:at] = chance.randbytes(chance.randint(1, 8))
        # The changed bytes may still be a valid message.
        try:
            return Message(call, bytes(octets), type(request).FromString(bytes(octets)))
        except Exception:  # DecodeError, or text that is not UTF-8
            return Message(call, bytes(octets), None)

    def _change(self, message: Any) -> None:
        """Set, add or clear one random field of the message or of a message inside it."""
        while True:
            fields = [f for f in message.DESCRIPTOR.fields if f.name != "windows"]
            if not fields:
                return
            # Most fields are in inner messages.
            weights = [1 if f.message_type is None or is_map(f) else 4 for f in fields]
            (chosen,) = self._chance.choices(fields, weights)
            if self._chance.random() < 1 / 12:
                message.ClearField(chosen.name)
                return
            if chosen.message_type is None or is_map(chosen):
                self._set(message, chosen)
                return
            target = getattr(message, chosen.name)
            if not chosen.is_repeated:
                target.SetInParent()
                message = target
            elif len(target) and self._chance.random() < 1 / 2:
                if self._chance.random() < 1 / 8:  # a duplicate
                    target.add().CopyFrom(target[0])
                    return
                message = self._chance.choice(list(target))
            else:
                message = target.add()

    def _set(self, message: Any, chosen: FieldDescriptor) -> None:
        target = getattr(message, chosen.name)
        if is_map(chosen):
            keys = [*PLAUSIBLE.get(chosen.name, ["key"]), *target]
            key = (
                self._chance.choice(keys)
                if self._chance.random() < 3 / 4
                else self._chance.choice(ODD_TEXTS)
            )
            target[key] = self._chance.choice(["1", "0", "max", *ODD_TEXTS])
        elif not chosen.is_repeated:
            setattr(message, chosen.name, self._value(chosen))
        elif len(target) and self._chance.random() < 1 / 2:
            target[self._chance.randrange(len(target))] = self._value(chosen)
        else:
            target.append(self._value(chosen))

    def _value(self, chosen: FieldDescriptor) -> Any:
        chance = self._chance
        if chosen.enum_type is not None:
            return chance.choice([*(v.number for v in chosen.enum_type.values), 99, -1])
        plausible = self._plausible(chosen)
        if plausible and chance.random() < 2 / 3:
            return chance.choice(plausible)
        return chance.choice(NUMBERS.get(chosen.type, ODD_TEXTS))

    def _plausible(self, chosen: FieldDescriptor) -> list[Any]:
        name, things, chance = chosen.name, self._things, self._chance
        if chosen.type != FieldDescriptor.TYPE_STRING:
            return PLAUSIBLE.get(name, []) if name == "stop_signal" else []
        if name.endswith("id"):
            first = 1 if self._call in DESTRUCTIVE and chance.random() < 9 / 10 else 0
            candidates = [*things.pods[first:], *things.containers[first:]]
            return [
                *candidates,
                *(each[:6] for each in candidates[:2]),
                UNKNOWN_ID,
                f"../{UNKNOWN_ID}",
            ]
        if name.startswith("image") or name == "user_specified_image":
            return things.images
        if name == "container_path":
            return [
                "/mnt",
                "/mnt/../mnt",
                "/",
                "/proc",
                "/proc/sys",
                "/dev/x",
                "/dev/null",
                "/etc/hosts",
                "mnt",
            ]
        if name.endswith(("path", "directory", "location")) and name not in PLAUSIBLE:
            return things.host_paths
        return PLAUSIBLE.get(name, [])


def is_map(of: FieldDescriptor) -> bool:
    """Return whether the field is a map, which the descriptors show as a repeated message."""
    return bool(of.message_type and of.message_type.GetOptions().map_entry)

"""Tests that input of twice the size makes twice the work, not four times: every parser of foreign
bytes gets its worst case.

Hostile inputs come as many small pieces, as one huge piece, a byte at a time, nested deeply, and
with many duplicates. Refusing must be as cheap. `tests/cri/images/test_growth.py` has layers,
archives and parsers that need files.
"""

from __future__ import annotations

import asyncio
import base64
import json
import random
import re
import zlib
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from cni_plugins.protocol import call as cni_call
from cni_plugins.protocol.config import PluginConfig, decode_object, parse_list_object
from cni_plugins.protocol.errors import CniError
from cni_plugins.protocol.result import Result
from cri_server.api import api_pb2 as api
from cri_server.http2 import frames, hpack
from cri_server.http2.connection import Http2Connection as Http2
from cri_server.images.formats import manifest
from cri_server.images.formats.reference import Reference
from cri_server.images.registry import auth, hosts
from cri_server.rpc import grpc_framing as grpc_wire
from cri_server.sandboxes import sysctls
from cri_server.spec import cdi, mounts, pod_files, process, user
from cri_server.streaming import websocket
from cri_server.streaming.remotecommand import TerminalSizes
from cri_server.streaming.spdy import frames as spdy
from cri_server.streaming.spdy.connection import SpdyConnection as Spdy
from cri_server.streaming.spdy.headers import Packer
from cri_server.streaming.upgrade import Refused, RequestReader
from pyrunc import jsontext
from pyrunc.cgroups import stats
from pyrunc.errors import Error
from pyrunc.kernel import cgroup
from pyrunc.seccomp import profile
from pyrunc.shim.log_file import PENDING_LIMIT_BYTES, LogFile
from pyrunc.shim.log_lines import LogLines
from pyrunc.spec import check, parse
from tests.support.growth import GrowsTooFast, Work, check_growth
from tests.support.spdy import syn_stream

REFUSED = (Error, CniError, Refused, ValueError, grpc_wire.CallFailed)


def refusable(work: Work, *also: type[Exception]) -> Work:
    """Return a function that does the work and ignores a refusal: one of the errors in REFUSED and
    `also`."""

    def run() -> None:
        try:
            work()
        except (*REFUSED, *also):
            pass

    return run


def all_of(feed: Callable[[bytes], object], parts: Iterable[bytes]) -> Work:
    return lambda: [feed(part) for part in parts]


# ---- the measurement itself


def test_quadratic_work_is_detected() -> None:
    def prepare(size: int) -> Work:
        def grow() -> None:
            items = list(range(size))
            while items:
                items.remove(items[-1])

        return grow

    with pytest.raises(GrowsTooFast):
        check_growth(prepare, 1000, largest=1 << 14)


def test_linear_work_is_accepted() -> None:
    check_growth(lambda size: lambda: sorted(range(size)), 1000)


# ---- terminal sizes


@pytest.mark.parametrize(
    "unit",
    [
        b"{}",
        b'{"Width":1,"Height":1}\n',
        b"1 ",
        b"[]",
        b"{",
        b" ",
        b"\xff",
        b'"',
        b"[",
        b'{"a":',
        b"9",
    ],
    ids=repr,
)
@pytest.mark.parametrize("cut", [1, 1 << 20])
def test_terminal_sizes_are_read_in_linear_time(unit: bytes, cut: int) -> None:
    def prepare(size: int) -> Work:
        sizes, data = TerminalSizes(), unit * size
        return all_of(sizes.feed, [data[at : at + cut] for at in range(0, len(data), cut)])

    check_growth(prepare, 20_000, largest=1 << 19)


# ---- HTTP/2 and gRPC

HELLO = frames.PREFACE + frames.settings({})


def headers_frame(block: bytes, stream_id: int, flags: int) -> bytes:
    return frames.head(len(block), frames.HEADERS, flags, stream_id) + block


REQUEST_BLOCK = b"".join(
    hpack.literal(name, value)
    for name, value in ((b":method", b"POST"), (b":scheme", b"http"), (b":path", b"/x"))
)


OPEN_1 = headers_frame(REQUEST_BLOCK, 1, frames.END_HEADERS)

HTTP2_ATTACKS: dict[str, Callable[[int], Any]] = {
    "pings": lambda size: frames.pong(b"x" * 8) * size,
    "requests": lambda size: b"".join(
        headers_frame(REQUEST_BLOCK, 2 * n + 1, frames.END_HEADERS | frames.END_STREAM)
        for n in range(size)
    ),
    "opened and reset": lambda size: b"".join(
        headers_frame(REQUEST_BLOCK, 2 * n + 1, frames.END_HEADERS)
        + frames.rst_stream(2 * n + 1, 8)
        for n in range(size)
    ),
    "data of one byte": lambda size: OPEN_1 + (frames.head(1, frames.DATA, 0, 1) + b"x") * size,
    "empty data": lambda size: OPEN_1 + frames.head(0, frames.DATA, 0, 1) * size,
    "settings": lambda size: frames.settings({frames.Setting.INITIAL_WINDOW_SIZE: 5}) * size,
    "windows": lambda size: frames.window_update(0, 2000) * size,
    "continuations": lambda size: (
        headers_frame(b"", 1, 0) + frames.head(0, frames.CONTINUATION, 0, 1) * size
    ),
    "unknown frames": lambda size: frames.head(0, 200, 0, 0) * size,
    "garbage": lambda size: b"\0" * size * 9,
}


@pytest.mark.parametrize("name", HTTP2_ATTACKS)
@pytest.mark.parametrize("cut", [1, 1 << 16])
def test_http2_frames_are_read_in_linear_time(name: str, cut: int) -> None:
    def prepare(size: int) -> Work:
        connection, data = Http2(), HELLO + HTTP2_ATTACKS[name](size)
        return all_of(connection.receive, [data[at : at + cut] for at in range(0, len(data), cut)])

    check_growth(prepare, 2000, largest=1 << 17)


def integer(value: int) -> bytes:
    value -= 0x7F
    out = bytearray()
    while value >= 0x80:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*out, value])


LONG_FIELD = b"\x40" + hpack.literal(b"n" * 20, b"v" * 4000)[1:]

HPACK_ATTACKS: dict[str, Callable[[int], Any]] = {
    "references": lambda size: LONG_FIELD + b"\xbe" * size,
    "insertions": lambda size: b"\x40\x01a\x01b" * size,
    "huffman": lambda size: b"\x00\x01a" + b"\xff" + integer(size) + b"\x07" * size,
    "long integers": lambda size: b"\xff" + b"\x80" * size,
    "duplicates": lambda size: b"\x00\x01a\x01b" * size,
    "static": lambda size: b"\x82" * size,
}


@pytest.mark.parametrize("name", HPACK_ATTACKS)
def test_hpack_is_decoded_in_linear_time(name: str) -> None:
    def prepare(size: int) -> Work:
        block, decoder = HPACK_ATTACKS[name](size), hpack.HpackDecoder()

        def run() -> None:
            try:
                decoder.decode(block, 16 << 10)
            except hpack.BadBlock:
                pass

        return run

    check_growth(prepare, 20_000)


@pytest.mark.parametrize("cut", [1, 1000, 1 << 20])
def test_grpc_messages_are_read_in_linear_time(cut: int) -> None:
    def prepare(size: int) -> Work:
        incoming = grpc_wire.IncomingMessage(b"identity")
        data = grpc_wire.message(b"x" * size * cut)
        parts = [data[at : at + cut] for at in range(0, len(data), cut)]
        return lambda: ([incoming.add(part) for part in parts], incoming.finish())

    check_growth(prepare, 1 << 15 if cut == 1 else (2 << 20) // cut, largest=(8 << 20) // cut)


# ---- SPDY and WebSocket


def syn_streams(count: int) -> bytes:
    packer = Packer()
    block = {"streamtype": ["data"]}
    return b"".join(syn_stream(2 * n + 1, packer.pack(block), fin=False) for n in range(count))


SPDY_ATTACKS: dict[str, Callable[[int], bytes]] = {
    "pings": lambda size: b"".join(spdy.ping(2 * n + 1) for n in range(size)),
    "streams": syn_streams,
    "data of one byte": lambda size: syn_streams(1) + (spdy.data_head(1, 1, False) + b"x") * size,
    "empty data": lambda size: syn_streams(1) + spdy.data_head(1, 0, False) * size,
    "one frame": lambda size: syn_streams(1) + spdy.data_head(1, 8 * size, False) + b"x" * 8 * size,
    "resets": lambda size: syn_streams(1) + spdy.rst_stream(1, spdy.Status.CANCEL) * size,
}


@pytest.mark.parametrize("name", SPDY_ATTACKS)
@pytest.mark.parametrize("cut", [1, 1 << 16])
def test_spdy_frames_are_read_in_linear_time(name: str, cut: int) -> None:
    def prepare(size: int) -> Work:
        connection, data = Spdy(), SPDY_ATTACKS[name](size)

        def run() -> None:
            for at in range(0, len(data), cut):
                connection.receive(data[at : at + cut])
                connection.data_to_send()

        return run

    check_growth(prepare, 2000, largest=1 << 18)


@pytest.mark.parametrize(
    "plain", [b"\0\0\0\x01\0\0\0\x01a\xff\xff\xff\xff", b"\0" * 8], ids=["long", "zeros"]
)
def test_spdy_headers_are_unpacked_in_linear_time(plain: bytes) -> None:
    def prepare(size: int) -> Work:
        packer = Packer()._stream
        # Much larger unpacked than packed.
        block = packer.compress(plain * size) + packer.flush(zlib.Z_SYNC_FLUSH)
        connection = Spdy()
        data = syn_stream(1, block[:60_000], fin=False)
        return lambda: connection.receive(data)

    check_growth(prepare, 20_000)


class Pieces:
    """A socket from which `data` is read in pieces of `cut` bytes."""

    def __init__(self, data: bytes, cut: int) -> None:
        self.parts = iter([data[at : at + cut] for at in range(0, len(data), cut)])

    async def receive(self) -> bytes:
        return next(self.parts, b"")

    async def send(self, *parts: bytes) -> None:
        pass

    def post(self, data: bytes) -> None:
        pass

    async def hung_up(self) -> None:
        await asyncio.Event().wait()


def ws_frame(opcode: int, data: bytes, fin: bool = True) -> bytes:
    size = len(data)
    length = (
        bytes([0x80 | size])
        if size < 126
        else b"\xfe" + size.to_bytes(2, "big")
        if size < 65536
        else b"\xff" + size.to_bytes(8, "big")
    )
    return bytes([(0x80 if fin else 0) | opcode]) + length + b"\0\0\0\0" + data


WS_ATTACKS: dict[str, Callable[[int], Any]] = {
    "messages": lambda size: ws_frame(2, b"\0x") * size,
    "fragments": lambda size: ws_frame(2, b"\0", fin=False) + ws_frame(0, b"x", fin=False) * size,
    "empty fragments": lambda size: (
        ws_frame(2, b"\0", fin=False) + ws_frame(0, b"", fin=False) * size
    ),
    "pings": lambda size: ws_frame(9, b"x" * 100) * size,
    "one message": lambda size: ws_frame(2, b"\0" * 16 * size),
    "garbage": lambda size: b"\0" * size,
}


@pytest.mark.parametrize("name", WS_ATTACKS)
@pytest.mark.parametrize("cut", [1, 1 << 16])
def test_websocket_frames_are_read_in_linear_time(name: str, cut: int) -> None:
    def prepare(size: int) -> Work:
        data = WS_ATTACKS[name](size)

        async def run() -> None:
            channels = websocket.Channels(
                websocket.Messages(Pieces(data, cut)), websocket.DIALECTS[""]
            )
            await channels.run()

        return lambda: asyncio.run(run())

    check_growth(prepare, 2000, largest=1 << 17)


def test_base64_of_websockets_is_read_in_linear_time() -> None:
    def prepare(size: int) -> Work:
        data = ws_frame(1, b"0" + base64.b64encode(b"x" * size))

        async def run() -> None:
            messages = websocket.Messages(Pieces(data, 1 << 16))
            await websocket.Channels(messages, websocket.DIALECTS["base64.channel.k8s.io"]).run()

        return lambda: asyncio.run(run())

    check_growth(prepare, 50_000, largest=1 << 19)


HEAD = b"POST /exec/x HTTP/1.1\r\nHost: node\r\n"


@pytest.mark.parametrize(
    "data",
    [
        b"a: b\r\n",
        b"a:" + b" " * 50 + b"\r\n",
        b"a: b\r\n c\r\n",
        b"\r\n",
        b"x",
        b"a: ,,,,,,\r\n",
        b"\r\r",
    ],
    ids=repr,
)
@pytest.mark.parametrize("cut", [1, 1 << 16])
def test_http_requests_are_read_in_linear_time(data: bytes, cut: int) -> None:
    def prepare(size: int) -> Work:
        def run() -> None:
            for _ in range(4):
                reader = RequestReader()
                whole = HEAD + data * size + b"\r\n"
                refusable(
                    all_of(
                        reader.receive, [whole[at : at + cut] for at in range(0, len(whole), cut)]
                    )
                )()

        return run

    check_growth(prepare, 64, largest=1 << 14)


# ---- JSON

JSON_ATTACKS: dict[str, Callable[[int], str]] = {
    "depth": lambda size: "[" * size,
    "closed depth": lambda size: '{"a":' * size + "1" + "}" * size,
    "list": lambda size: "[" + "1," * size + "1]",
    "keys": lambda size: "{" + ",".join(f'"k{n}":{n}' for n in range(size)) + "}",
    "one key": lambda size: "{" + '"k":1,' * size + '"k":1}',
    "digits": lambda size: "9" * size,
    "fraction": lambda size: "0." + "1" * size,
    "exponent": lambda size: "1e" + "1" * size,
    "escapes": lambda size: '"' + "\\u0041" * size + '"',
    "surrogates": lambda size: '"' + "\\ud800" * size + '"',
    "white": lambda size: " " * size,
    "strings": lambda size: '"' * size,
    "commas": lambda size: "[" + "," * size,
}


@pytest.mark.parametrize("name", JSON_ATTACKS)
def test_json_is_read_in_linear_time(name: str) -> None:
    def prepare(size: int) -> Work:
        text = JSON_ATTACKS[name](size)
        data = text.encode()

        # The readers of our files, manifests, image configurations, tokens, plugins' answers and
        # CDI.
        def run() -> None:
            refusable(lambda: jsontext.loads(text))()
            refusable(lambda: manifest.parse(data))()
            refusable(lambda: manifest.parse_config(data))()
            refusable(lambda: auth.read_token(data, "server"))()
            refusable(lambda: decode_object(data, "the answer"))()
            refusable(lambda: msgspec.json.decode(data, type=cdi.Specification), RecursionError)()

        return run

    check_growth(prepare, 10_000, largest=1 << 20)


def descriptor(number: int = 0, media_type: str = manifest.OCI_LAYER) -> dict[str, Any]:
    return {"mediaType": media_type, "digest": f"sha256:{number:064x}", "size": 1}


IMAGE_CONFIG = descriptor(0, manifest.OCI_CONFIG)

IMAGE_DOCUMENTS: dict[str, Callable[[int], Any]] = {
    "layers": lambda size: {
        "schemaVersion": 2,
        "config": IMAGE_CONFIG,
        "layers": [descriptor(n) for n in range(size)],
    },
    "manifests": lambda size: {
        "schemaVersion": 2,
        "manifests": [descriptor(n) for n in range(size)],
    },
    "annotations": lambda size: {
        "schemaVersion": 2,
        "layers": [],
        "config": {**IMAGE_CONFIG, "annotations": {f"k{n}": "v" for n in range(size)}},
    },
    "env": lambda size: {
        "rootfs": {"diff_ids": []},
        "config": {"Env": [f"K{n}=v" for n in range(size)]},
    },
    "same env": lambda size: {"rootfs": {"diff_ids": []}, "config": {"Env": ["K=v"] * size}},
    "labels": lambda size: {
        "rootfs": {"diff_ids": []},
        "config": {"Labels": {f"k{n}": "v" for n in range(size)}},
    },
    "volumes": lambda size: {
        "rootfs": {"diff_ids": []},
        "config": {"Volumes": {f"/{n}": {} for n in range(size)}},
    },
    "diff ids": lambda size: {
        "rootfs": {"type": "layers", "diff_ids": [f"sha256:{n:064x}" for n in range(size)]}
    },
}


@pytest.mark.parametrize("name", IMAGE_DOCUMENTS)
def test_image_documents_are_read_in_linear_time(name: str) -> None:
    def prepare(size: int) -> Work:
        data = json.dumps(IMAGE_DOCUMENTS[name](size)).encode()
        return lambda: (
            refusable(lambda: manifest.parse(data))(),
            refusable(lambda: manifest.parse_config(data))(),
        )

    check_growth(prepare, 2000, largest=10_000)  # more volumes are refused


# ---- other answers of registries


@pytest.mark.parametrize(
    "unit",
    [
        "a",
        "a ",
        "a=b,",
        'a="b",',
        "a=",
        '"',
        "\\",
        " ",
        ",",
        'a="\\',
        "a = ",
        "basic realm=x, ",
        "=",
    ],
    ids=repr,
)
def test_challenges_are_read_in_linear_time(unit: str) -> None:
    check_growth(
        lambda size: lambda: auth.challenges("bearer " + unit * size), 5000, largest=1 << 20
    )


@pytest.mark.parametrize(
    "unit",
    ["a", "a.", "a-", "a/", "a:", "@", "__", "a+", "[", "é"],
    ids=repr,
)
@pytest.mark.parametrize("shape", ["{}", "host/{}!", "a@{}!", "a:{}", "{}:5000/a"])
def test_references_are_parsed_in_linear_time(unit: str, shape: str) -> None:
    def prepare(size: int) -> Work:
        text = shape.format(unit * size)
        return refusable(lambda: [Reference.parse(text) for _ in range(10)])

    check_growth(prepare, 256, largest=1024)


HOSTS_ATTACKS: dict[str, Callable[[int], str]] = {
    "hosts": lambda size: "".join(f'[host."https://h{n}"]\n' for n in range(size)),
    "dots": lambda size: ".".join("a" * size) + " = 1\n",
    "table of dots": lambda size: "[" + ".".join("a" * size) + "]\n",
    "depth": lambda size: "a = " + "[" * size,
    "inline tables": lambda size: "a = " + "{b=" * size,
    "digits": lambda size: "a = " + "9" * size,
    "string": lambda size: 'a = """' + "\\" * size,
    "comments": lambda size: "#\n" * size,
    "white": lambda size: " " * size,
    "keys": lambda size: "".join(f"k{n} = 1\n" for n in range(size)),
    "dotted keys": lambda size: "".join(f"a.b.c.k{n} = 1\n" for n in range(size)),
    "lists of tables": lambda size: "[[a]]\n" * size,
    "duration": lambda size: f'dial_timeout = "{"1m" * size}"\n',
    "headers": lambda size: "[header]\n" + "".join(f'h{n} = ["x"]\n' for n in range(size)),
}


@pytest.mark.parametrize("name", HOSTS_ATTACKS)
def test_hosts_files_are_read_in_linear_time(name: str, tmp_path: Path) -> None:
    (tmp_path / "registry").mkdir()
    file = tmp_path / "registry" / "hosts.toml"

    def prepare(size: int) -> Work:
        text = HOSTS_ATTACKS[name](size)

        def run() -> None:
            file.write_text(text)
            refusable(lambda: hosts.hosts_for("registry", [tmp_path]))()

        return run

    check_growth(prepare, 500, largest=1 << 19)


# ---- networks


RESULTS: dict[str, Callable[[int], Any]] = {
    "interfaces": lambda size: {"interfaces": [{"name": "eth0"}] * size},
    "ips": lambda size: {"ips": [{"address": "10.0.0.1/24"}] * size},
    "routes": lambda size: {"routes": [{"dst": "10.0.0.0/8"}] * size},
    "nameservers": lambda size: {"dns": {"nameservers": ["1.1.1.1"] * size}},
    "search": lambda size: {"dns": {"search": ["a." * size]}},
    "address": lambda size: {"ips": [{"address": "1" * size}]},
    "mac": lambda size: {"interfaces": [{"name": "eth0", "mac": "00:" * size}]},
    "name": lambda size: {"interfaces": [{"name": "a" * size}]},
    "unknown keys": lambda size: {f"k{n}": n for n in range(size)},
}


@pytest.mark.parametrize("name", RESULTS)
def test_cni_results_are_read_in_linear_time(name: str) -> None:
    def prepare(size: int) -> Work:
        data = json.dumps({"cniVersion": "1.0.0", **RESULTS[name](size)}).encode()
        return refusable(
            lambda: Result.from_json(decode_object(data, "it"), default_version="1.0.0")
        )

    check_growth(prepare, 2000, largest=1 << 14)


NETWORKS: dict[str, Callable[[int], Any]] = {
    "plugins": lambda size: {"plugins": [{"type": "bridge"}] * size},
    "versions": lambda size: {"plugins": [{"type": "bridge"}], "cniVersions": ["1.0.0"] * size},
    "name": lambda size: {"name": "n" * size, "plugins": [{"type": "bridge"}]},
    "type": lambda size: {"plugins": [{"type": "/" * size}]},
    "attachments": lambda size: {
        "cni.dev/valid-attachments": [{"containerID": "a", "ifname": "b"}] * size
    },
}


@pytest.mark.parametrize("name", NETWORKS)
def test_cni_configurations_are_read_in_linear_time(name: str) -> None:
    def prepare(size: int) -> Work:
        data = json.dumps({"name": "net", "type": "bridge", **NETWORKS[name](size)}).encode()
        return lambda: (
            refusable(lambda: parse_list_object(decode_object(data, "it")))(),
            refusable(lambda: PluginConfig.parse(data).valid_attachments())(),
        )

    check_growth(prepare, 2000, largest=1 << 14)


@pytest.mark.parametrize("unit", ["a=b;", ";", "=", "a"], ids=repr)
def test_cni_arguments_are_read_in_linear_time(unit: str) -> None:
    check_growth(
        lambda size: refusable(lambda: cni_call.parse_arguments(unit * size)), 5000, largest=1 << 20
    )


@pytest.mark.parametrize("kind", ["servers", "searches", "options"])
def test_resolv_conf_is_written_in_linear_time(kind: str) -> None:
    def prepare(size: int) -> Work:
        dns: dict[str, Any] = {kind: ["10.0.0.1"] * size}
        config = api.PodSandboxConfig(dns_config=api.DNSConfig(**dns))
        return refusable(lambda: pod_files.resolv_conf(config))

    check_growth(prepare, 5000, largest=1 << 20)


def test_sysctls_are_checked_in_linear_time() -> None:
    def prepare(size: int) -> Work:
        settings = {f"net.ipv4.{'a.' * 20}k{n}": "1" for n in range(size)} | {
            "net." + "a." * size: "1"
        }
        return refusable(lambda: sysctls.check(settings, api.NamespaceOption()))

    check_growth(prepare, 2000, largest=1 << 14)


# ---- values of images and requests for a container


@pytest.mark.parametrize(
    "unit",
    [
        b"u:x:1:1::/:\n",
        b"\n",
        b":",
        b",",
        b"g:x:1:" + b"u," * 50 + b"\n",
        b"u:x:" + b"9" * 50,
        b"\xff\n",
    ],
    ids=repr,
)
def test_passwd_and_group_are_read_in_linear_time(unit: bytes) -> None:
    context = api.LinuxContainerSecurityContext(run_as_username="u")

    def prepare(size: int) -> Work:
        return refusable(
            lambda: user.resolve(
                context, "", user.Accounts.parse(b"u:x:1:1::/:\n" + unit * size, unit * size)
            )
        )

    check_growth(prepare, 2000, largest=1 << 14)


def test_users_of_images_are_resolved_in_linear_time() -> None:
    nobody = user.Accounts()
    context = api.LinuxContainerSecurityContext()
    for unit in ("9", "0", ":", "a"):
        check_growth(
            lambda size, unit=unit: refusable(lambda: user.resolve(context, unit * size, nobody)),  # type: ignore[misc]
            10_000,
            largest=1 << 22,
        )


def test_supplemental_groups_are_resolved_in_linear_time() -> None:
    def prepare(size: int) -> Work:
        context = api.LinuxContainerSecurityContext(supplemental_groups=list(range(size)))
        return lambda: user.resolve(context, "", user.Accounts())

    check_growth(prepare, 2000)


@pytest.mark.parametrize("same", [True, False])
def test_environments_are_merged_in_linear_time(same: bool) -> None:
    def prepare(size: int) -> Work:
        lines = ["K=v" if same else f"K{n}=v" for n in range(size)]
        pairs = [("K" if same else f"K{n}", "w") for n in range(size)]
        return lambda: process.environment(lines, pairs, hostname="h", tty=True, home="/")

    check_growth(prepare, 2000)


@pytest.mark.parametrize(
    "path", ["/m{}", "/dev/{}", "/same", "/" + "a/" * 50 + "{}", "/" + "../" * 50 + "{}"]
)
def test_mounts_of_requests_are_checked_in_linear_time(path: str) -> None:
    def prepare(size: int) -> Work:
        requests = [api.Mount(container_path=path.format(n), host_path="/tmp") for n in range(size)]
        defaults = mounts.defaults(
            "/a", ipc=api.POD, shared_shm=True, privileged=False, readonly_root=False
        )
        return lambda: mounts.merge(defaults, mounts.check_requests(requests))

    check_growth(prepare, 500)


CDI_EDITS: dict[str, Callable[[int], dict[str, Any]]] = {
    "env": lambda n: {"env": [f"K{n}=v"]},
    "same env": lambda n: {"env": ["K=v"]},
    "nodes": lambda n: {
        "deviceNodes": [{"path": f"/dev/d{n}", "type": "c", "major": 1, "minor": n}]
    },
    "same node": lambda n: {
        "deviceNodes": [{"path": "/dev/d", "type": "c", "major": 1, "minor": 3}]
    },
    "groups": lambda n: {"additionalGids": [n]},
    "mounts": lambda n: {"mounts": [{"hostPath": "/h", "containerPath": f"/c{n}"}]},
    "hooks": lambda n: {"hooks": [{"hookName": "prestart", "path": "/h"}]},
}


@pytest.mark.parametrize("name", CDI_EDITS)
def test_cdi_edits_are_merged_in_linear_time(name: str) -> None:
    def prepare(size: int) -> Work:
        # A request can name thousands of devices, which one file of 4 MiB can define.
        edits = [msgspec.convert(CDI_EDITS[name](n), cdi.CdiEdits) for n in range(size)]
        spec: dict[str, Any] = {
            "process": {"env": ["PATH=/bin"], "user": {"additionalGids": []}},
            "linux": {"resources": {"devices": []}},
            "mounts": [],
        }
        return lambda: cdi.apply(spec, edits)

    check_growth(prepare, 500)


@pytest.mark.parametrize("unit", ["a.b/c=d,", ",", "a", "a-", "=", "a/", "a.b/c="], ids=repr)
def test_cdi_names_are_checked_in_linear_time(unit: str) -> None:
    check_growth(
        lambda size: refusable(lambda: cdi.names([unit * size], {"cdi.k8s.io/x": unit * size})),
        5000,
        largest=1 << 20,
    )


CDI_HEAD = "cdiVersion: '0.6.0'\nkind: vendor.com/class\n"
CDI_YAML: dict[str, Callable[[int], str]] = {
    "devices": lambda size: "devices:\n" + "".join(f"- name: d{n}\n" for n in range(size)),
    "depth": lambda size: "devices: " + "[" * size,
    "aliases": lambda size: "x: &a [b]\ndevices:\n" + "- *a\n" * size,
    "aliases of aliases": lambda size: (
        f"x: &e\n  env: [{'A=b, ' * size}]\ndevices:\n" + "- {name: n, containerEdits: *e}\n" * size
    ),
    "keys of one hash": lambda size: (
        "x:\n" + "".join(f"  {n * (2**61 - 1)}: 1\n" for n in range(size))
    ),
}


@pytest.mark.parametrize("name", CDI_YAML)
def test_cdi_files_in_yaml_are_read_in_linear_time(name: str, tmp_path: Path) -> None:
    file = tmp_path / "vendor.yaml"

    def prepare(size: int) -> Work:
        text = CDI_HEAD + CDI_YAML[name](size)

        def run() -> None:
            file.write_text(text)
            try:
                cdi._read(file)
            except (ValueError, RecursionError):
                pass

        return run

    # The scanner looks 1024 characters ahead: depth costs up to there.
    check_growth(prepare, 2000 if name == "depth" else 200, largest=1 << 14)


def test_cdi_files_have_few_aliases(tmp_path: Path) -> None:
    file = tmp_path / "vendor.yaml"
    # n devices that share an alias of a list with n names need few bytes, but have n times n names.
    file.write_text(CDI_HEAD + CDI_YAML["aliases of aliases"](cdi.ALIASES_LIMIT))
    assert len(cdi._read(file).devices) == cdi.ALIASES_LIMIT
    file.write_text(CDI_HEAD + CDI_YAML["aliases of aliases"](cdi.ALIASES_LIMIT + 1))
    with pytest.raises(ValueError, match="more than 100 aliases"):
        cdi._read(file)


# ---- the OCI configuration


def configuration(**parts: Any) -> dict[str, Any]:
    return {
        "ociVersion": "1.2.0",
        "root": {"path": "rootfs"},
        "process": {"args": ["sh"], "cwd": "/", **parts.pop("process", {})},
        "linux": {"namespaces": [{"type": "mount"}, {"type": "network"}], **parts.pop("linux", {})},
        **parts,
    }


BIND = {"destination": "/m", "source": "/", "type": "bind", "options": ["rbind"]}

CONFIGURATIONS: dict[str, Callable[[int], Any]] = {
    "mounts": lambda size: configuration(
        mounts=[{**BIND, "destination": f"/m{n}"} for n in range(size)]
    ),
    "same mount": lambda size: configuration(mounts=[BIND] * size),
    "options": lambda size: configuration(mounts=[{**BIND, "options": ["ro"] * size}]),
    "env": lambda size: configuration(process={"env": ["A=b"] * size}),
    "rlimits": lambda size: configuration(
        process={"rlimits": [{"type": f"R{n}", "soft": 1, "hard": 1} for n in range(size)]}
    ),
    "groups": lambda size: configuration(
        process={"user": {"uid": 0, "gid": 0, "additionalGids": list(range(size))}}
    ),
    "affinity": lambda size: configuration(
        process={"execCPUAffinity": {"initial": "0-65535," * (size // 8) + "0"}}
    ),
    "devices": lambda size: configuration(
        linux={"devices": [{"path": f"/d{n}", "type": "c"} for n in range(size)]}
    ),
    "masked": lambda size: configuration(linux={"maskedPaths": [f"/m{n}" for n in range(size)]}),
    "sysctls": lambda size: configuration(
        linux={"sysctl": {f"net.k{n}": "1" for n in range(size)}}
    ),
    "one sysctl": lambda size: configuration(linux={"sysctl": {"net" + ".a" * size: "1"}}),
    "namespaces": lambda size: configuration(linux={"namespaces": [{"type": "pid"}] * size}),
    "links": lambda size: configuration(linux={"netDevices": {f"l{n}": {} for n in range(size)}}),
    "hooks": lambda size: configuration(hooks={"prestart": [{"path": "/h"}] * size}),
    "annotations": lambda size: configuration(annotations={f"k{n}": "v" for n in range(size)}),
    "device rules": lambda size: configuration(
        linux={"resources": {"devices": [{"allow": True}] * size}}
    ),
    "schemata": lambda size: configuration(linux={"intelRdt": {"schemata": ["L3:0=f"] * size}}),
    "surrogates": lambda size: configuration(hostname="\udcff" * size),
}


@pytest.mark.parametrize("name", CONFIGURATIONS)
def test_oci_configurations_are_parsed_in_linear_time(name: str) -> None:
    def prepare(size: int) -> Work:
        text = jsontext.dumps(CONFIGURATIONS[name](size))
        return refusable(lambda: check.check(parse.parse(jsontext.loads(text))))

    check_growth(prepare, 2000, largest=1 << 14)


SAME_CONDITION = {"index": 0, "value": 1, "op": "SCMP_CMP_EQ"}
RULE = {"names": ["read"], "action": "SCMP_ACT_ALLOW"}

FILTERS: dict[str, Callable[[int], Any]] = {
    "rules": lambda size: {"syscalls": [RULE] * size},
    "names": lambda size: {"syscalls": [{**RULE, "names": [f"s{n}" for n in range(size)]}]},
    "names and conditions": lambda size: {
        "syscalls": [{**RULE, "names": ["read"] * size, "args": [SAME_CONDITION] * size}]
    },
    "architectures": lambda size: {"syscalls": [RULE], "architectures": ["SCMP_ARCH_X86"] * size},
    "flags": lambda size: {"syscalls": [RULE], "flags": ["SECCOMP_FILTER_FLAG_LOG"] * size},
}


@pytest.mark.parametrize("name", FILTERS)
def test_seccomp_profiles_are_compiled_in_linear_time(name: str) -> None:
    def prepare(size: int) -> Work:
        document = {"defaultAction": "SCMP_ACT_ERRNO", **FILTERS[name](size)}
        return refusable(lambda: profile.parse(document))

    check_growth(prepare, 500, largest=1 << 14)


# ---- output of a container


@pytest.mark.parametrize(
    "unit", [b"\n", b"x", b"x" * 16385 + b"\n", b"x\n", b"\n" + b"x" * 16384], ids=len
)
@pytest.mark.parametrize("cut", [1, 4096, 1 << 16])
def test_log_lines_are_split_in_linear_time(unit: bytes, cut: int) -> None:
    stamp = b"2026-01-31T12:00:00.000000001Z"

    def prepare(size: int) -> Work:
        lines, data = LogLines("stdout"), unit * (size // len(unit) + 1)
        pieces = [data[at : at + cut] for at in range(0, len(data), cut)]
        return lambda: [lines.feed(piece, stamp) for piece in pieces]

    check_growth(prepare, 4096, largest=1 << 18)


def test_lines_of_a_full_disk_wait_in_linear_time() -> None:
    def prepare(size: int) -> Work:
        log = LogFile("/dev/full")
        record = b"2026-01-31T12:00:00.000000001Z stdout F x\n"

        def run() -> None:
            for _ in range(size):
                # Waits until there is room, up to PENDING_LIMIT_BYTES.
                log.write(record)
            log.close()

        return run

    check_growth(prepare, 2000, largest=PENDING_LIMIT_BYTES // 20)


# ---- the kernel's figures of a container


@pytest.mark.parametrize(
    "line", ["8:0 rbytes=1 wbytes=2\n", "8:0\n", "8:0 " + "a=1 " * 40 + "\n"], ids=len
)
def test_cgroup_statistics_are_read_in_linear_time(line: str) -> None:
    check_growth(lambda size: lambda: (stats.io_lines(line * size), cgroup.keyed(line * size)), 500)


def test_cgroup_files_are_read_in_linear_time(tmp_path: Path) -> None:
    def prepare(size: int) -> Work:
        # One line for each process, of which a container can make many.
        (tmp_path / "cgroup.procs").write_text("4194304\n" * size)
        return lambda: cgroup.read(str(tmp_path), "cgroup.procs")

    check_growth(prepare, 1 << 16, largest=1 << 20)


def test_regular_expressions_match_in_linear_time() -> None:
    """Every regular expression that is applied to untrusted text is matched against long texts of
    the characters that it contains."""
    alphabet = 'a1.-_/:=@ ,;\\"[]é'
    patterns = [
        value
        for module in (auth, hosts, cdi, cni_call)
        for value in vars(module).values()
        if isinstance(value, re.Pattern) and isinstance(value.pattern, str)
    ]
    assert len(patterns) > 5
    chosen = random.Random(7)
    for pattern in patterns:
        for unit in (*alphabet, *("".join(chosen.choices(alphabet, k=2)) for _ in range(20))):
            check_growth(
                lambda size, p=pattern, u=unit: lambda: p.fullmatch(u * size + "\0"),
                500,
                largest=1 << 16,
            )  # type: ignore[misc]

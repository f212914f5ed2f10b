"""A small container registry for tests: the distribution API for pulls, over HTTP or HTTPS, with
logins and faults.

Blobs are files below a folder. `Fault`s change the answers to the requests they match.
`python -m tests.support.registry --port N --root DIR [--auth U:P] FILE…` serves image archives.
"""

from __future__ import annotations

import argparse
import base64
import hashlib
import json
import re
import secrets
import ssl
import sys
import tarfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

from cri_server.images.archives.build import BuiltImage
from cri_server.images.formats import manifest as types
from tests.support.oci_archives import descriptor, manifest_of

_CHUNK = 64 << 10


@dataclass
class Fault:
    """A wrong answer to requests whose text `METHOD path` matches `match`. With `status`, the
    answer consists of `status`, `headers` and `body`. Otherwise the other fields change the
    right answer.

    - `times`: for how many requests; None: always.
    - `content`, `media_type`: other bytes, another type.
    - `length`: a false Content-Length; -1: none.
    - `cut_at`: close the connection after this number of bytes.
    - `stall_at`: send nothing more after this number of bytes; for POST and PUT, no answer at all.
    - `byte_delay_s`: send single bytes at this interval; for POST and PUT, a head that never ends.
    - `ignore_range`: answer with the whole content.
    """

    match: str
    times: int | None = None
    status: int | None = None
    headers: Mapping[str, str] = field(default_factory=dict)
    body: bytes = b""
    content: bytes | None = None
    media_type: str | None = None
    length: int | None = None
    cut_at: int | None = None
    stall_at: int | None = None
    byte_delay_s: float = 0
    ignore_range: bool = False


@dataclass(frozen=True)
class Request:
    """A request that the registry received."""

    method: str
    path: str
    headers: Mapping[str, str]


class Registry:
    """A registry on 127.0.0.1; a context manager.

    - `auth`: (scheme, user, password). The scheme is `basic` or `bearer` (tokens from `/token`).
    - `tls`: (certificate, key).
    - `requests`: all requests so far.
    """

    def __init__(
        self,
        root: Path,
        *,
        port: int = 0,
        tls: tuple[Path, Path] | None = None,
        auth: tuple[str, str, str] | None = None,
        address: str = "127.0.0.1",
    ) -> None:
        self.root, self.auth = root, auth
        (root / "blobs").mkdir(parents=True, exist_ok=True)
        self.manifests: dict[tuple[str, str], tuple[bytes, str]] = {}
        self.faults: list[Fault] = []
        self.requests: list[Request] = []
        self.tokens: set[str] = set()
        self.realm = ""
        self.algorithm = "sha256"  # of the digests of manifests
        self.answers_for = ""  # as a proxy: the prefix of requested URLs
        self.stopping = threading.Event()
        self._lock = threading.Lock()
        self._server = _Server((address, port), _handler(self))
        if tls:
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            context.load_cert_chain(*tls)
            self._server.socket = context.wrap_socket(
                self._server.socket, server_side=True, do_handshake_on_connect=False
            )
        self.scheme = "https" if tls else "http"
        self.host = f"{address}:{self._server.server_address[1]}"
        self.url = f"{self.scheme}://{self.host}"
        self._thread = threading.Thread(
            target=self._server.serve_forever, args=(0.02,), daemon=True
        )

    def __enter__(self) -> Registry:
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self.stop()

    def stop(self) -> None:
        """Stop answering and wait for the threads."""
        self.stopping.set()
        self._server.shutdown()
        self._server.server_close()

    def serve(self) -> None:
        """Answer until interrupted, in this thread."""
        self._server.serve_forever()

    # ---- content

    def put_blob(self, data: bytes, algorithm: str = "sha256") -> str:
        """Store a blob; return its digest."""
        digest = hashlib.new(algorithm, data).hexdigest()
        (self.root / "blobs" / digest).write_bytes(data)
        return f"{algorithm}:{digest}"

    def put_manifest(self, name: str, data: bytes, media_type: str) -> str:
        """Store a manifest or an index as `repository:tag` (or only by digest: `repository`);
        return its digest."""
        repository, _, tag = name.partition(":")
        digest = f"{self.algorithm}:{hashlib.new(self.algorithm, data).hexdigest()}"
        for reference in filter(None, (tag, digest)):
            self.manifests[repository, reference] = (data, media_type)
        return digest

    def push(
        self, name: str, image: BuiltImage, *, compress: str = "gzip", docker: bool = False
    ) -> str:
        """Store an image as `repository:tag`; return the manifest's digest."""
        data, blobs = manifest_of(image, compress, docker)
        for blob in blobs.values():
            self.put_blob(blob)
        return self.put_manifest(
            name, data, types.DOCKER_MANIFEST if docker else types.OCI_MANIFEST
        )

    def push_index(
        self, name: str, images: Mapping[tuple[str, str, str], BuiltImage], *, docker: bool = False
    ) -> str:
        """Store an index of images, keyed by (os, architecture, variant)."""
        entries = []
        for (system, architecture, variant), image in images.items():
            data, _ = manifest_of(image)
            self.push(name.partition(":")[0], image)
            platform = {
                "os": system,
                "architecture": architecture,
                **({"variant": variant} if variant else {}),
            }
            entries.append({**descriptor(data, types.OCI_MANIFEST), "platform": platform})
        kind = types.DOCKER_INDEX if docker else types.OCI_INDEX
        document = json.dumps(
            {"schemaVersion": 2, "mediaType": kind, "manifests": entries}
        ).encode()
        return self.put_manifest(name, document, kind)

    def push_archive(self, path: Path) -> list[str]:
        """Store all images of a docker-archive under their names without the host; return the
        names."""
        pushed = []
        for name, image in archive_images(path).items():
            pushed.append(without_host(name))
            self.push(pushed[-1], image, docker=True)
        return pushed

    # ---- faults

    def fault(self, match: str, **what: Any) -> Fault:
        """Add a `Fault` with these fields; return it."""
        self.faults.append(Fault(match, **what))
        return self.faults[-1]

    def fault_for(self, request: str) -> Fault | None:
        """Return the first fault that matches this request, and count its use; None without one."""
        with self._lock:
            for fault in self.faults:
                if re.search(fault.match, request) and fault.times != 0:
                    if fault.times is not None:
                        fault.times -= 1
                    return fault
        return None

    def requested(self, match: str) -> list[Request]:
        """Return the requests whose text `METHOD path` matches the regular expression `match`."""
        return [r for r in self.requests if re.search(match, f"{r.method} {r.path}")]


def archive_images(path: Path) -> dict[str, BuiltImage]:
    """Return the images of a docker-archive by name."""
    images: dict[str, BuiltImage] = {}
    with tarfile.open(path) as tar:

        def content(name: str) -> bytes:
            file = tar.extractfile(name)
            assert file is not None
            return file.read()

        for item in json.loads(content("manifest.json")):
            image = BuiltImage(
                tuple(content(name) for name in item["Layers"]), content(item["Config"])
            )
            images |= dict.fromkeys(item["RepoTags"], image)
    return images


def without_host(name: str) -> str:
    """Return an image's name without its host: `docker.io/library/busybox:latest` ->
    `library/busybox:latest`; a short name gets `library/`."""
    first, slash, rest = name.partition("/")
    if slash and ("." in first or ":" in first or first == "localhost"):
        return rest
    return name if slash else f"library/{name}"


class _Server(ThreadingHTTPServer):
    daemon_threads = False
    block_on_close = True
    request_queue_size = 128

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Ignore OSError: clients may hang up."""
        if not isinstance(sys.exc_info()[1], OSError):
            super().handle_error(request, client_address)


def _handler(registry: Registry) -> type[BaseHTTPRequestHandler]:
    class Handler(_Handler):
        owner = registry

    return Handler


class _Handler(BaseHTTPRequestHandler):
    owner: Registry
    protocol_version = "HTTP/1.1"
    timeout = 20
    disable_nagle_algorithm = True

    def log_message(self, format: str, *args: Any) -> None:
        """Print nothing: `Registry.requests` has all requests."""

    def do_GET(self) -> None:
        self._answer(b"")

    do_HEAD = do_GET

    def do_PUT(self) -> None:
        self.do_POST()

    def do_POST(self) -> None:
        self._answer(self.rfile.read(int(self.headers.get("Content-Length", 0))))

    def _answer(self, body: bytes) -> None:
        registry = self.owner
        if registry.answers_for:
            self.path = self.path.removeprefix(registry.answers_for)
        headers = {name.lower(): value for name, value in self.headers.items()}
        registry.requests.append(Request(self.command, self.path, headers))
        fault = registry.fault_for(f"{self.command} {self.path}") or Fault("")
        parts = urlsplit(self.path)
        if fault.status is not None:
            self._send(fault.status, fault.body, "text/plain", dict(fault.headers), Fault(""))
        elif parts.path == "/token":
            self._token(parts.query, body)
        elif not self._is_allowed():
            self._challenge()
        elif self.command in ("POST", "PUT"):
            self._hesitate(fault)
            self._take(parts.path, parse_qs(parts.query), body)
        else:
            self._content(parts.path, fault)

    def _hesitate(self, fault: Fault) -> None:
        """Delay the answer to a push: send nothing, or the status line and a header byte by
        byte."""
        if fault.stall_at is not None:
            self._stall()
        if fault.byte_delay_s:
            for byte in b"HTTP/1.1 201 Created\r\nX-Slow: " + bytes(_CHUNK):
                self.wfile.write(bytes([byte]))
                if self.owner.stopping.wait(fault.byte_delay_s):
                    break

    def _take(self, path: str, query: dict[str, list[str]], body: bytes) -> None:
        """Answer a request of a push: for an upload location, with a blob, or with a manifest."""
        if path.endswith("/blobs/uploads/"):
            self._send(
                202,
                b"",
                "text/plain",
                {"Location": f"{path}{secrets.token_hex(8)}?state=x"},
                Fault(""),
            )
        elif "/blobs/uploads/" in path:
            wrong = self.owner.put_blob(body) != query.get("digest", [""])[0]
            self._send(400 if wrong else 201, b"", "text/plain", {}, Fault(""))
        else:
            name, _, tag = path.removeprefix("/v2/").partition("/manifests/")
            digest = self.owner.put_manifest(
                f"{name}:{tag}", body, self.headers.get("Content-Type", "")
            )
            self._send(201, b"", "text/plain", {"Docker-Content-Digest": digest}, Fault(""))

    # ---- logins

    def _is_allowed(self) -> bool:
        if self.owner.auth is None:
            return True
        scheme, user, password = self.owner.auth
        sent = self.headers.get("Authorization", "")
        if scheme == "basic":
            return sent == "Basic " + base64.b64encode(f"{user}:{password}".encode()).decode()
        return sent.removeprefix("Bearer ") in self.owner.tokens

    def _challenge(self) -> None:
        assert self.owner.auth is not None
        if self.owner.auth[0] == "basic":
            value = 'Basic realm="registry"'
        else:
            realm = self.owner.realm or f"{self.owner.url}/token"
            repository = self.path.split("/manifests/")[0].split("/blobs/")[0].removeprefix("/v2/")
            value = (
                f'Bearer realm="{realm}",service="registry",scope="repository:{repository}:pull"'
            )
        error = b'{"errors":[{"code":"UNAUTHORIZED","message":"log in"}]}'
        self._send(401, error, "application/json", {"WWW-Authenticate": value}, Fault(""))

    def _token(self, query: str, body: bytes) -> None:
        assert self.owner.auth is not None
        _, user, password = self.owner.auth
        form = parse_qs(body.decode() if body else query)
        expected = "Basic " + base64.b64encode(f"{user}:{password}".encode()).decode()
        refreshed = form.get("grant_type") == ["refresh_token"] and form.get("refresh_token") == [
            password
        ]
        if self.headers.get("Authorization") != expected and not refreshed:
            self._send(401, b"{}", "application/json", {}, Fault(""))
            return
        token = secrets.token_urlsafe(16)
        self.owner.tokens.add(token)
        key = "access_token" if refreshed else "token"
        self._send(
            200,
            json.dumps({key: token, "expires_in": 300}).encode(),
            "application/json",
            {},
            Fault(""),
        )

    # ---- content

    def _content(self, path: str, fault: Fault) -> None:
        match = re.fullmatch(
            r"/v2/(?P<name>.+)/(?P<kind>manifests|blobs)/(?P<reference>[^/]+)", path
        )
        if path.rstrip("/") == "/v2":
            self._send(200, b"{}", "application/json", {}, fault)
        elif path.endswith("/tags/list"):
            name = path.removeprefix("/v2/").removesuffix("/tags/list")
            tags = sorted(
                r for n, r in self.owner.manifests if n == name and not r.startswith("sha256:")
            )
            body = json.dumps({"name": name, "tags": tags}).encode()
            self._send(200, body, "application/json", {}, fault)
        elif match and match["kind"] == "manifests":
            self._manifest(match["name"], match["reference"], fault)
        elif match:
            self._blob(match["reference"], fault)
        else:
            self._missing()

    def _manifest(self, name: str, reference: str, fault: Fault) -> None:
        manifest = self.owner.manifests.get((name, reference))
        if manifest is None:
            return self._missing("MANIFEST_UNKNOWN")
        digest = (
            f"{self.owner.algorithm}:{hashlib.new(self.owner.algorithm, manifest[0]).hexdigest()}"
        )
        data = manifest[0] if fault.content is None else fault.content
        return self._send(200, data, manifest[1], {"Docker-Content-Digest": digest}, fault)

    def _blob(self, digest: str, fault: Fault) -> None:
        path = self.owner.root / "blobs" / digest.rpartition(":")[2]
        if not path.is_file():
            return self._missing("BLOB_UNKNOWN")
        match = re.fullmatch(r"bytes=(\d+)-", self.headers.get("Range", ""))
        if fault == Fault("") and not match:
            return self._file(path)
        data = path.read_bytes() if fault.content is None else fault.content
        if match and not fault.ignore_range:
            start, size = int(match[1]), len(data)
            if start >= size:
                return self._send(
                    416, b"", "text/plain", {"Content-Range": f"bytes */{size}"}, fault
                )
            more = {"Content-Range": f"bytes {start}-{size - 1}/{size}"}
            return self._send(206, data[start:], "application/octet-stream", more, fault)
        return self._send(200, data, "application/octet-stream", {"Accept-Ranges": "bytes"}, fault)

    def _file(self, path: Path) -> None:
        """Send a file by sendfile(2)."""
        # So the registry of a benchmark takes little CPU time.
        with path.open("rb") as file:
            self.send_response(200)
            self.send_header("Content-Type", "application/octet-stream")
            self.send_header("Content-Length", str(path.stat().st_size))
            self.send_header("Accept-Ranges", "bytes")
            self.end_headers()
            if self.command != "HEAD":
                self.connection.sendfile(file)

    def _missing(self, code: str = "NAME_UNKNOWN") -> None:
        body = json.dumps({"errors": [{"code": code, "message": "no such thing"}]}).encode()
        self._send(404, body, "application/json", {}, Fault(""))

    def _send(
        self, status: int, data: bytes, media_type: str, headers: Mapping[str, str], fault: Fault
    ) -> None:
        self.send_response(status)
        self.send_header(
            "Content-Type", media_type if fault.media_type is None else fault.media_type
        )
        if fault.length != -1:
            self.send_header(
                "Content-Length", str(len(data) if fault.length is None else fault.length)
            )
        for name, value in {**headers, **fault.headers}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self._body(data, fault)

    def _body(self, data: bytes, fault: Fault) -> None:
        stop_at = min((at for at in (fault.cut_at, fault.stall_at) if at is not None), default=None)
        step = 1 if fault.byte_delay_s else _CHUNK
        for at in range(0, len(data) if stop_at is None else stop_at, step):
            end = at + step if stop_at is None else min(at + step, stop_at)
            self.wfile.write(data[at:end])
            if fault.byte_delay_s and self.owner.stopping.wait(fault.byte_delay_s):
                break
        self.wfile.flush()
        if fault.stall_at is not None:
            self._stall()
        if stop_at is not None or fault.length is not None:
            self.close_connection = True

    def _stall(self) -> None:
        """Send nothing more until the client hangs up or the test ends."""
        self.connection.settimeout(0.05)
        while not self.owner.stopping.is_set():
            try:
                if not self.connection.recv(1):
                    return
            except TimeoutError:
                continue
            except OSError:
                return


def wait_for(condition: Callable[[], bool], timeout_s: float = 30.0) -> bool:
    """Wait until `condition()` is true; return False when the time is up."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.01)
    return True


def main(arguments: Sequence[str]) -> None:
    """Serve image archives until the process is killed."""
    parser = argparse.ArgumentParser(prog="python -m tests.support.registry", description=__doc__)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--address", default="127.0.0.1")
    parser.add_argument("--root", type=Path, required=True)
    parser.add_argument("--auth", help="USER:PASSWORD, asked for by basic authentication")
    parser.add_argument("archives", nargs="*", type=Path)
    options = parser.parse_args(arguments)
    login = None
    if options.auth:
        user, _, password = options.auth.partition(":")
        login = ("basic", user, password)
    registry = Registry(options.root, port=options.port, auth=login, address=options.address)
    for archive in options.archives:
        print("serving", *registry.push_archive(archive), flush=True)
    try:
        registry.serve()
    except KeyboardInterrupt:
        pass


if __name__ == "__main__":
    main(sys.argv[1:])

"""Fetches a registry's content: resolves references, and downloads manifests and blobs. Tries the
registry's hosts in order, logs in, and repeats failed requests.

Blocking: runs in a pull's threads. Content is checked against its digest before it is used. Nothing
can check which digest a tag means: the first host that answers decides. A broken download of a blob
is continued by a Range request, on the next host if necessary.
"""

from __future__ import annotations

import math
import re
import threading
import time
from collections.abc import Callable, Mapping
from email.utils import parsedate_to_datetime
from typing import TypeVar
from urllib.parse import quote

from urllib3.response import BaseHTTPResponse

from cri_server.images.formats import manifest as manifests
from cri_server.images.formats.digests import algorithm_of, digest_of, is_content, is_digest
from cri_server.images.formats.manifest import Descriptor
from cri_server.images.formats.reference import Reference, normal_registry
from cri_server.images.layers.incoming import DigestMismatch, IncomingBlob
from cri_server.images.model import Auth
from cri_server.images.registry import auth as logins
from cri_server.images.registry.auth import Credential
from cri_server.images.registry.client import Body, HostUnavailable, RegistrySession
from cri_server.images.registry.hosts import PULL, RESOLVE, RegistryHost
from pyrunc.errors import Error, InvalidSpec, NotFound, PeerError

Result = TypeVar("Result")

ATTEMPTS = 4
BLOB_ATTEMPTS = 5  # in a row with less than PROGRESS_BYTES each
MIRROR_ATTEMPTS = 2  # there is another host
PROGRESS_BYTES = 256 << 10
BACKOFF_S = (0.2, 0.6, 1.5, 3.0)
RETRY_AFTER_LIMIT_S = 60.0  # a longer wait fails the pull at once: kubelet tries again itself
MIRROR_RETRY_AFTER_LIMIT_S = 3.0  # there is another host
CHUNK_BYTES = 256 << 10
_ACCEPT = {"Accept": ", ".join(manifests.ACCEPTED)}
_CODE = re.compile(r'"code"\s*:\s*"([A-Z_]{1,40})"')
# Registries behind load balancers answer with these for a moment. Any other 4xx would be the answer
# to a second request, too.
_RETRIED = {408, 429, 500, 502, 503, 504}
_OLDEST_TIME_S = 1e9  # a larger Retry-After is a time, not a duration
# 18 digits at most: int() raises ValueError for more than 4,300 (CVE-2020-10735).
_RANGE = re.compile(r"bytes ([0-9]{1,18})-[0-9]{1,18}/(?:[0-9]{1,18}|\*)")
_LENGTH = re.compile(r"[0-9]{1,18}")


class Unauthorized(PeerError):
    """The registry requires a login, or refuses the login that it got."""


class _NoSuch(NotFound):
    """The host does not have the requested manifest or blob."""


class Registry:
    """Fetches the content of one reference from its hosts, for one pull. Thread-safe."""

    def __init__(
        self,
        session: RegistrySession,
        reference: Reference,
        hosts: list[RegistryHost],
        auth: Auth | None,
        actions: str = "pull",
    ) -> None:
        """`actions`: what a requested token permits, `pull` or `pull,push` (distribution's token
        scope)."""
        self._session, self._reference, self._hosts = session, reference, hosts
        self._actions = actions
        self._credentials = {host: logins.credential(auth, reference, host) for host in hosts}
        self._tokens: dict[RegistryHost, str] = {}
        self._lock = threading.Lock()

    def resolve(self, stored: Mapping[str, Descriptor]) -> tuple[Descriptor, bytes | None]:
        """Return the descriptor of the manifest or index that the reference means now, and its
        content; the content is None if the descriptor is in `stored`. Raises NotFound,
        Unauthorized, PeerError, InvalidSpec (hosts.toml).

        `stored`: the stored descriptors of this repository, by digest. If there are any, a HEAD
        asks for the current digest, and a GET follows only if this digest is not stored. Docker
        Hub's rate limit counts GETs of manifests, but not HEADs.
        """
        reference = self._reference
        capability = PULL if reference.digest else RESOLVE

        def find(host: RegistryHost) -> tuple[Descriptor, bytes | None]:
            digest = self._current_digest(host, reference) if stored else ""
            if digest in stored:
                return stored[digest], None
            return self._manifest(host, reference.target, reference.digest)

        return self._from_hosts(capability, find)

    def manifest(self, descriptor: Descriptor) -> bytes:
        """Fetch the manifest or index that `descriptor` (an entry of an index) names, and return
        its content. Raises NotFound, Unauthorized, PeerError, InvalidSpec (hosts.toml)."""

        def fetch(host: RegistryHost) -> bytes:
            _, data = self._manifest(host, descriptor.digest, descriptor.digest)
            if len(data) != descriptor.size:
                raise DigestMismatch(
                    f"manifest {descriptor.digest} has {len(data)} bytes, not {descriptor.size}"
                )
            return data

        return self._from_hosts(PULL, fetch)

    def blob(
        self, descriptor: Descriptor, ingest: IncomingBlob, arrived: Callable[[int], None]
    ) -> None:
        """Download a blob into `ingest`, and verify its digest and size. `arrived` is called with
        the size of each piece in bytes, and with a negative size when downloaded bytes are
        discarded. Raises NotFound, Unauthorized, PeerError, InvalidSpec (hosts.toml)."""

        def fetch(host: RegistryHost) -> None:
            begun_by_another = ingest.size > 0
            try:
                self._checked_blob(host, descriptor, ingest, arrived)
            except DigestMismatch:
                # This host continued bytes of another host, which may have sent wrong ones:
                # download the whole blob from this host.
                if not begun_by_another:
                    raise
                self._checked_blob(host, descriptor, ingest, arrived)

        self._from_hosts(PULL, fetch, retry=False)  # `_blob` continues where it broke off

    def _checked_blob(
        self,
        host: RegistryHost,
        descriptor: Descriptor,
        ingest: IncomingBlob,
        arrived: Callable[[int], None],
    ) -> None:
        try:
            self._blob(host, descriptor, ingest, arrived)
            ingest.check(descriptor.digest, descriptor.size)
        except DigestMismatch:
            arrived(-ingest.size)
            ingest.restart()
            raise

    def document(self, tag: str) -> bytes:
        """Fetch the manifest with the tag `tag` from the repository; return its bytes unparsed and
        unverified, because it need not describe an image. Raises NotFound, Unauthorized,
        PeerError, InvalidSpec (hosts.toml)."""

        def fetch(host: RegistryHost) -> bytes:
            with self._open(host, f"manifests/{tag}", _ACCEPT) as response:
                return self._all(host, response, manifests.LIMIT_BYTES, "a manifest")

        return self._from_hosts(PULL, fetch)

    def small_blob(self, digest: str, limit_bytes: int) -> bytes:
        """Fetch the blob with this digest into memory, and verify it; return its content. Raises
        PeerError for a blob longer than `limit_bytes`, NotFound, Unauthorized, InvalidSpec
        (hosts.toml)."""

        def fetch(host: RegistryHost) -> bytes:
            with self._open(host, f"blobs/{digest}", {}) as response:
                data = self._all(host, response, limit_bytes, "a blob")
            if not is_content(data, digest):
                raise DigestMismatch(f"{host.netloc}: blob {digest} has the wrong content")
            return data

        return self._from_hosts(PULL, fetch)

    # ---- hosts in order

    def _from_hosts(
        self, capability: str, fetch: Callable[[RegistryHost], Result], *, retry: bool = True
    ) -> Result:
        """Call `fetch` with each host that has the capability, in order, until a call succeeds;
        return its result. `retry`: call `fetch` again for a host that is unavailable.

        If all hosts fail, the error has the kind of the last host's error; the last host is the
        registry itself.

        - NotFound, Unauthorized, PeerError: the message has the errors of all hosts. It begins with
          RegistryUnavailable if the last host was unavailable.
        - InvalidSpec: a certificate of the last host cannot be used.
        """
        failures: list[Error] = []
        for host in self._hosts:
            if not host.can(capability):
                continue
            try:
                return self._retrying(host, fetch) if retry else fetch(host)
            # InvalidSpec: a certificate of this host cannot be used.
            except (PeerError, NotFound, InvalidSpec) as error:
                failures.append(error)
        if not failures:
            raise PeerError(f"no host of {self._reference.domain} has the capability {capability}")
        if isinstance(failures[-1], InvalidSpec):
            raise failures[-1]
        message = "; ".join(dict.fromkeys(error.message for error in failures))
        last = failures[-1]
        if isinstance(last, HostUnavailable):
            raise PeerError(f"RegistryUnavailable: {message}")
        if isinstance(last, NotFound):
            raise NotFound(message)
        raise PeerError(message) if not isinstance(last, Unauthorized) else Unauthorized(message)

    def _retrying(self, host: RegistryHost, fetch: Callable[[RegistryHost], Result]) -> Result:
        failures = 0
        while True:
            try:
                return fetch(host)
            except HostUnavailable as error:
                failures += 1
                self._pause(host, failures, ATTEMPTS, error)

    def _pause(self, host: RegistryHost, failures: int, limit: int, error: HostUnavailable) -> None:
        """Wait before the next request to `host`, at least as long as `host` demands.

        Raises `error` instead in these cases:

        - `host` has failed `limit` times (a mirror: MIRROR_ATTEMPTS times).
        - `host` demands too long a wait.
        - `host` is a mirror, and refuses connections.
        """
        is_last = host is self._hosts[-1]
        retry_after_s = error.retry_after_s or 0.0
        if not is_last:
            limit = 1 if error.refused else MIRROR_ATTEMPTS
        limit_s = RETRY_AFTER_LIMIT_S if is_last else MIRROR_RETRY_AFTER_LIMIT_S
        if failures >= limit or retry_after_s > limit_s:
            raise error
        self._session.sleep(max(BACKOFF_S[min(failures, len(BACKOFF_S)) - 1], retry_after_s))

    # ---- manifests

    def _current_digest(self, host: RegistryHost, reference: Reference) -> str:
        """Ask the host with a HEAD which digest the reference means now. Return "" for an error,
        and for an answer without a digest, which the specification permits. The caller then sends a
        GET.

        Raises HostUnavailable (no answer), Unauthorized (no token).
        """
        response, _ = self._response(host, f"manifests/{reference.target}", _ACCEPT, "HEAD")
        with response:
            # so that the connection can be used again
            self._all(host, response, 0, "an answer to HEAD")
            # Some registries answer each HEAD with 403, others with 400, 404, 405, 429, 501 or 503.
            # docker falls back to GET as well; containerd does so for 405 only.
            if response.status != 200:
                return ""
            digest = str(response.headers.get("Docker-Content-Digest", reference.digest or ""))
        return digest if reference.digest in (None, digest) else ""

    def _manifest(
        self, host: RegistryHost, target: str, digest: str | None
    ) -> tuple[Descriptor, bytes]:
        with self._open(host, f"manifests/{target}", _ACCEPT) as response:
            data = self._all(host, response, manifests.LIMIT_BYTES, "a manifest")
            sent = response.headers.get("Content-Type", "").partition(";")[0].strip()
            promised = response.headers.get("Docker-Content-Digest", "")
        named = digest or (promised if is_digest(promised) else None)
        actual = digest_of(data, algorithm_of(named))
        for expected in (digest, promised if is_digest(promised) else None):
            if expected and not is_content(data, expected):
                raise DigestMismatch(
                    f"{host.netloc}: manifest {target} has the digest {actual}, not {expected}"
                )
        manifests.parse(data, sent)
        media_type = sent if sent in manifests.ACCEPTED else manifests.media_type(data)
        return Descriptor(media_type, actual, len(data)), data

    def _all(
        self, host: RegistryHost, response: BaseHTTPResponse, limit_bytes: int, what: str
    ) -> bytes:
        data = bytearray()
        while piece := self._session.read(response, CHUNK_BYTES):
            data += piece
            if len(data) > limit_bytes:
                raise PeerError(f"{host.netloc}: {what} has more than {limit_bytes} bytes")
        return bytes(data)

    # ---- blobs

    def _blob(
        self,
        host: RegistryHost,
        descriptor: Descriptor,
        ingest: IncomingBlob,
        arrived: Callable[[int], None],
    ) -> None:
        failures, reached = 0, ingest.size
        while ingest.size < descriptor.size or (not descriptor.size and not failures):
            try:
                self._blob_part(host, descriptor, ingest, arrived)
                if ingest.size >= descriptor.size:
                    return
                raise HostUnavailable(
                    f"{host.netloc}: blob {descriptor.digest} ended after"
                    f" {ingest.size} of {descriptor.size} bytes"
                )
            except HostUnavailable as error:
                # A server without ranges sends the same bytes again: only new bytes are progress.
                failures = 1 if ingest.size - reached >= PROGRESS_BYTES else failures + 1
                reached = max(reached, ingest.size)
                self._pause(host, failures, BLOB_ATTEMPTS, error)

    def _blob_part(
        self,
        host: RegistryHost,
        descriptor: Descriptor,
        ingest: IncomingBlob,
        arrived: Callable[[int], None],
    ) -> None:
        headers = {"Range": f"bytes={ingest.size}-"} if ingest.size else {}
        with self._open(host, f"blobs/{descriptor.digest}", headers) as response:
            if not _continues(response, ingest.size):
                arrived(-ingest.size)
                ingest.restart()
            length = response.headers.get("Content-Length", "")
            if _LENGTH.fullmatch(length) and ingest.size + int(length) > descriptor.size:
                raise DigestMismatch(
                    f"{host.netloc}: blob {descriptor.digest} has"
                    f" {ingest.size + int(length)} bytes, not {descriptor.size}"
                )
            while piece := self._session.read(response, CHUNK_BYTES):
                if ingest.size + len(piece) > descriptor.size:
                    raise DigestMismatch(
                        f"{host.netloc}: blob {descriptor.digest} has more than"
                        f" {descriptor.size} bytes"
                    )
                ingest.write(piece)
                arrived(len(piece))

    # ---- one request, logged in

    def _open(self, host: RegistryHost, what: str, headers: dict[str, str]) -> BaseHTTPResponse:
        """Send a GET for the manifest or blob `what` (as for `url`), logging in if necessary;
        return the response, whose status is 200 or 206. Raises HostUnavailable, Unauthorized,
        _NoSuch, PeerError."""
        response, other = self._response(host, what, headers)
        if response.status in (200, 206):
            return response
        try:
            if response.status == 401 and other:
                raise Unauthorized(
                    f"{host.netloc} redirects to {other}, which requires another login"
                )
            raise self._refusal(host, response, what)
        finally:
            response.close()

    def _response(
        self, host: RegistryHost, what: str, headers: dict[str, str], method: str = "GET"
    ) -> tuple[BaseHTTPResponse, str]:
        """Send a request for the manifest or blob `what` (as for `url`), follow redirects, and log
        in when the host requires it. Return the response, of any status, and the other host to
        which a redirect led ("" if there was none). Raises HostUnavailable, Unauthorized."""
        url = self.url(host, what) + self._namespace(host)
        return self._with_login(
            host, lambda login: self._session.get(host, url, headers | login, method)
        )

    def _with_login(
        self,
        host: RegistryHost,
        send: Callable[[dict[str, str]], tuple[BaseHTTPResponse, str]],
    ) -> tuple[BaseHTTPResponse, str]:
        """Call `send` with the Authorization header of the current login, if there is one. When the
        host answers 401, log in and call `send` again. Return the result of the last call.

        `send` returns the response, and the other host that a redirect led to. If that host answers
        401, this method does not log in. Raises HostUnavailable, Unauthorized.
        """
        response, other = send(self._authorization(host))
        if response.status == 401 and not other:
            response.close()
            self._log_in(host, response.headers.getlist("WWW-Authenticate"))
            response, other = send(self._authorization(host))
        return response, other

    # ---- requests of a push and a login

    def url(self, host: RegistryHost, what: str) -> str:
        """Return the URL of the manifest or blob `what` (`manifests/TAG`, `blobs/DIGEST`) at the
        host."""
        return (
            f"{host.url}{quote(host.prefix)}/{quote(host.repository(self._reference.path))}/{what}"
        )

    def check(self, host: RegistryHost) -> None:
        """Check that `host` accepts the login. Raises Unauthorized when it refuses the login,
        HostUnavailable when it does not answer, NotFound or PeerError for another status than
        200."""
        response = self.request("GET", host, f"{host.url}{quote(host.prefix)}/", {}, None)
        self.expect(host, response, "login", (200,))

    def has_blob(self, host: RegistryHost, digest: str) -> bool:
        """Return whether `host` has the blob. A registry that stores its blobs elsewhere, such as
        in S3, redirects there; then any status other than 200 means that the blob is missing.
        Raises HostUnavailable, Unauthorized, PeerError."""
        what = f"blobs/{digest}"
        response, other = self._response(host, what, {}, "HEAD")
        if not other and response.status != 404:
            self.expect(host, response, what, (200,))
        response.close()
        return response.status == 200

    def request(
        self, method: str, host: RegistryHost, url: str, headers: dict[str, str], body: Body
    ) -> BaseHTTPResponse:
        """Send a request without following redirects; return the response. Raises HostUnavailable,
        Unauthorized.

        When the host requires a login, log in and send the request again. This is not possible if
        `body` is an iterator: then an earlier request must have logged in.
        """

        def send(login: dict[str, str]) -> tuple[BaseHTTPResponse, str]:
            return self._session.send(method, host, url, headers | login, body), ""

        if body is None or isinstance(body, bytes):
            return self._with_login(host, send)[0]
        return send(self._authorization(host))[0]

    def expect(
        self, host: RegistryHost, response: BaseHTTPResponse, what: str, statuses: tuple[int, ...]
    ) -> None:
        """Raise Unauthorized, NotFound or PeerError unless the response's status is one of
        `statuses`; close the response in any case. `what` names the manifest or blob in the error.
        """
        try:
            if response.status not in statuses:
                raise self._refusal(host, response, what)
        finally:
            response.close()

    def _namespace(self, host: RegistryHost) -> str:
        """Return the query `?ns=REGISTRY`, which tells a mirror to which registry the content
        belongs; "" for the registry itself. containerd sends the same query."""
        # Only for a mirror: the query is not in the distribution specification.
        registry = self._reference.registry
        return "" if normal_registry(host.netloc) == registry else f"?ns={quote(registry)}"

    def _authorization(self, host: RegistryHost) -> dict[str, str]:
        with self._lock:
            value = self._tokens.get(host)
        return {"Authorization": value} if value else {}

    def _log_in(self, host: RegistryHost, headers: list[str]) -> None:
        """Answer the challenges in the WWW-Authenticate `headers` with the host's credential, and
        store the Authorization header for later requests. Raises Unauthorized, PeerError."""
        offered = [challenge for header in headers for challenge in logins.challenges(header)]
        login = self._credentials[host]
        bearer = next((c for c in offered if c.scheme == "bearer"), None)
        if login.bearer:
            value: str | None = f"Bearer {login.bearer}"
        elif bearer is not None:
            value = f"Bearer {self._token(host, bearer, login)}"
        elif any(c.scheme == "basic" for c in offered):
            value = login.basic
        else:
            raise Unauthorized(f"{host.netloc}: 401 unauthorized, and no supported login method")
        if value is None:
            raise Unauthorized(
                f"{host.netloc}: 401 unauthorized, and no credentials are configured for it"
            )
        with self._lock:
            self._tokens[host] = value

    def _token(self, host: RegistryHost, challenge: logins.Challenge, login: Credential) -> str:
        request = logins.token_request(
            challenge,
            login,
            host,
            f"repository:{host.repository(self._reference.path)}:{self._actions}",
        )

        with self._session.token(host, request.url, request.headers, request.body) as response:
            if response.status != 200:
                text = f"{host.netloc}: the token server answered HTTP status {response.status}"
                # An overloaded token server has not refused the login.
                if response.status in _RETRIED:
                    raise _overloaded(text, response)
                raise Unauthorized(text)
            return logins.read_token(
                self._all(host, response, logins.TOKEN_LIMIT_BYTES, "a token"), host.netloc
            )

    def _refusal(self, host: RegistryHost, response: BaseHTTPResponse, what: str) -> Error:
        """Return the error for a response whose status is a failure. The message shows only the
        registry's error code from the body, because the body may echo secrets of the request."""
        try:
            code = _CODE.search(
                self._all(host, response, 64 << 10, "an error").decode("utf-8", "replace")
            )
        except PeerError:
            code = None
        status = f"{response.status}" + (f" {code[1]}" if code else "")
        target = what.replace("manifests/", "").replace("blobs/", "")
        subject = f"{host.netloc}: {host.repository(self._reference.path)} {target}"
        if response.status in (401, 403):
            return Unauthorized(f"{subject}: {status} unauthorized")
        if response.status == 404:
            return _NoSuch(f"{subject}: not found")
        if response.status in _RETRIED:
            return _overloaded(f"{host.netloc}: {status}", response)
        if response.status == 416:  # the requested range does not exist
            return DigestMismatch(f"{subject}: the blob is shorter than promised")
        return PeerError(f"{subject}: unexpected status {status}")


def _continues(response: BaseHTTPResponse, at: int) -> bool:
    """Return whether the response's body begins at the offset `at` of the blob. A server that
    ignores the Range header sends the whole blob."""
    if not at:
        return True
    content_range = _RANGE.fullmatch(response.headers.get("Content-Range", ""))
    return response.status == 206 and content_range is not None and int(content_range[1]) == at


def _overloaded(message: str, response: BaseHTTPResponse) -> HostUnavailable:
    """Return the error for an overloaded server. Its `retry_after_s` comes from the response's
    Retry-After header."""
    retry_after_s = retry_after(response.headers.get("Retry-After", ""), time.time())
    if retry_after_s is not None and retry_after_s > RETRY_AFTER_LIMIT_S:
        message += f", and no more requests for {math.ceil(retry_after_s)} s"
    return HostUnavailable(message, retry_after_s)


def retry_after(value: str, now: float) -> float | None:
    """Return how many seconds a Retry-After header with `value` demands to wait; None if `value` is
    malformed.

    `value`: a number of seconds, a date (RFC 9110 section 10.2.3), or seconds since 1970, as Docker
    Hub sends. `now`: the current time in seconds since 1970.
    """
    value = value.strip()
    # isascii(), because other scripts' digits are decimal, too, and no header has them.
    if value.isascii() and value.isdecimal() and len(value) < 12:
        seconds = float(value)
        return max(0.0, seconds - now) if seconds > _OLDEST_TIME_S else seconds
    try:
        return max(0.0, parsedate_to_datetime(value).timestamp() - now)
    except (ValueError, OverflowError):
        return None

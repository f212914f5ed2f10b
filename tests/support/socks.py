"""A small SOCKS 5 proxy (RFC 1928, RFC 1929) that connects every client to one server."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable
from socketserver import BaseRequestHandler, ThreadingTCPServer

NO_LOGIN, LOGIN, NONE_FITS = 0, 2, 0xFF
DOMAIN = 3


class SocksProxy:
    """A SOCKS proxy on 127.0.0.1; a context manager. `targets`: each (name, port) that a client
    asked for."""

    def __init__(self, place: tuple[str, int], login: tuple[str, str] | None = None) -> None:
        self.place, self.login = place, login
        self.targets: list[tuple[str, int]] = []
        owner = self

        class Handler(BaseRequestHandler):
            def handle(self) -> None:
                owner.answer(self.request)

        self._server = ThreadingTCPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self.host = f"127.0.0.1:{self._server.server_address[1]}"

    def __enter__(self) -> SocksProxy:
        threading.Thread(target=self._server.serve_forever, args=(0.02,), daemon=True).start()
        return self

    def __exit__(self, *error: object) -> None:
        self._server.shutdown()
        self._server.server_close()

    def answer(self, client: socket.socket) -> None:
        """Serve one connection: the greeting, a login, the request for a name, then bytes in both
        directions."""
        file = client.makefile("rb")
        version, count = file.read(2)
        method = LOGIN if self.login else NO_LOGIN
        if version != 5 or method not in file.read(count):
            client.sendall(bytes([5, NONE_FITS]))
            return
        client.sendall(bytes([5, method]))
        if self.login and not self._is_logged_in(file.read, client):
            return
        *_, kind = file.read(4)
        assert kind == DOMAIN, "the client asks the proxy to resolve the name"
        name = file.read(file.read(1)[0]).decode()
        self.targets.append((name, int.from_bytes(file.read(2), "big")))
        with socket.create_connection(self.place) as target:
            client.sendall(bytes([5, 0, 0, 1, *bytes(6)]))
            back = threading.Thread(target=_copy, args=(target, client), daemon=True)
            back.start()
            _copy(client, target)
            back.join()

    def _is_logged_in(self, read: Callable[[int], bytes], client: socket.socket) -> bool:
        read(1)
        login = tuple(read(read(1)[0]).decode() for _ in range(2))
        client.sendall(bytes([1, login != self.login]))
        return login == self.login


def _copy(source: socket.socket, target: socket.socket) -> None:
    try:
        while data := source.recv(1 << 16):
            target.sendall(data)
        target.shutdown(socket.SHUT_WR)
    except OSError:
        pass

"""Tests error texts of the registry's transport: a server that speaks HTTP instead of TLS."""

from __future__ import annotations

import socket
import threading

import pytest
import urllib3

from cri_server.images.registry.client import describe_error


def test_the_error_names_a_server_that_speaks_http_instead_of_tls() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def answer() -> None:
            connection, _ = listener.accept()
            with connection:
                connection.recv(1 << 16)
                connection.sendall(b"HTTP/1.1 400 Bad Request\r\nContent-Length: 0\r\n\r\n")

        threading.Thread(target=answer, daemon=True).start()
        port = listener.getsockname()[1]
        pool = urllib3.HTTPSConnectionPool("127.0.0.1", port, retries=False, timeout=10)
        with pytest.raises(urllib3.exceptions.HTTPError) as caught:
            pool.request("GET", "/v2/")
        pool.close()
    assert describe_error(caught.value, f"127.0.0.1:{port}") == (
        f'it speaks HTTP, not TLS: set server = "http://127.0.0.1:{port}" in its hosts.toml'
    )

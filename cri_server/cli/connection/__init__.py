"""The connection to a running server: HTTP/2 over its socket, and the CRI stubs on top."""

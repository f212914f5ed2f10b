"""HTTP/2 as a server on a local socket needs it (RFC 9113, RFC 7541): a state machine without I/O,
made for small calls."""

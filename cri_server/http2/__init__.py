"""An HTTP/2 server core for a local socket (RFC 9113, RFC 7541): a state machine without I/O, fast
for small calls."""

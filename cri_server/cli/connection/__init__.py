"""The connection of a command to a running server: HTTP/2 over a unix socket, and CRI calls on
top."""

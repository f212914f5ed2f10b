"""Exec, attach and port-forward sessions: an HTTP server on loopback for SPDY/3.1 and WebSocket.

The cores (`spdy`, `upgrade`) turn bytes into events without I/O. `transport` moves bytes with
back-pressure, `multiplex` and `websocket` split them into streams, `remotecommand` and
`portforward` connect streams to a session's descriptors, `server` listens and hands out single-use
URLs.
"""

"""Exec, attach and port-forward sessions: an HTTP server on loopback that speaks SPDY/3.1 and
WebSocket.

The cores (`spdy`, `upgrade`, `channels`) take bytes and give events, without I/O. `wire` moves
bytes with back-pressure, `multiplex` and `websocket` make streams of them, `remotecommand` and
`portforward` join streams to a session's descriptors, `server` listens and hands out single-use
URLs.
"""

"""SPDY/3.1 without I/O: `frames` has the byte layout, `headers` the compression, `connection` the
server's state machine.

Source: the SPDY/3.1 draft of the Chromium project. The clients are Go programs (kubelet, kubectl,
crictl) with moby/spdystream. That library has no flow control: it grants no window credit, and
ignores SETTINGS and WINDOW_UPDATE. So this side does not wait for credit either; only TCP slows a
sender down.
"""

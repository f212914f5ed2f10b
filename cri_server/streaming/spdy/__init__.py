"""SPDY/3.1 without I/O: `frames` has the byte layout, `headers` the compression, `connection` the
server's state machine.

Source: the SPDY/3.1 draft of the Chromium project. The clients (kubelet, kubectl, crictl) use the
Go library moby/spdystream. That library has no flow control: it grants no window credit, and
ignores SETTINGS and WINDOW_UPDATE. So this side does not wait for credit either; only TCP slows a
sender down.
"""

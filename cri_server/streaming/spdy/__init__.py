"""SPDY/3.1 without I/O: `frames` is the byte layout, `headers` the compression, `connection` the
state of both sides.

Source: the SPDY/3.1 draft of the Chromium project. The peers are Go programs (kubelet, kubectl,
crictl) on moby/spdystream, which has no flow control: it never grants window credit and ignores
SETTINGS and WINDOW_UPDATE. So this side never waits for credit either; what holds back a sender is
TCP alone.
"""

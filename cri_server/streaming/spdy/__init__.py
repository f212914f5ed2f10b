"""SPDY/3.1 without I/O: `frames` has the byte layout, `headers` the compression, `connection` the
state machine of both sides.

Source: the SPDY/3.1 draft of the Chromium project. The peers are Go programs (kubelet, kubectl,
crictl) on moby/spdystream, which has no flow control: it grants no window credit and ignores
SETTINGS and WINDOW_UPDATE. So this side waits for no credit either; TCP alone slows a sender down.
"""

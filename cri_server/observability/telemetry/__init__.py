"""The server's own numbers for Prometheus, and whether it is well: loaded only when `[metrics]
address` is set."""

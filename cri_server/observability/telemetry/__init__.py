"""Prometheus metrics and a health check of the server, loaded only with `[metrics] address`."""

"""Tests the plugins on the real kernel. Each test has its own host, a network namespace that ends
with the test."""

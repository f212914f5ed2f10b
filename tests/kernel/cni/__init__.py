"""The plugins against the real kernel. Each test has a host of its own: a network namespace that
ends with it."""

"""The plugins against the real kernel, each test on a host of its own: a network namespace that
ends with it."""

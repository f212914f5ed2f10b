"""The plugins against the real kernel. Each test has its own host: a network namespace that
ends with it."""

"""Suites of others that run in the guest."""

"""Runs test suites of other projects in the guest."""

"""Calls to Linux, one facility per file. The functions have the names and the argument order of the
manual pages, and make no decisions."""

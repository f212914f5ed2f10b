"""Calls to Linux: one facility per file, with the manual pages' names and argument order, and
without policy."""

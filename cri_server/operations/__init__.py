"""Runs operations: named steps with undo, calls that join a running operation, locks by key, groups
of tasks."""

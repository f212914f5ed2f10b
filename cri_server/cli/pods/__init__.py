"""Verbs that make pods, also again: run, runp, create, restart, start and demo."""

"""Verbs that create, start and restart pods and containers: run, runp, create, restart, start,
demo."""

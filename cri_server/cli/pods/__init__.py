"""Verbs that make pods: run, runp, create and demo."""

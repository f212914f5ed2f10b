"""Verbs that show what runs, what it uses and what happened."""

"""Verbs that show what runs, which resources it uses, and what has happened."""

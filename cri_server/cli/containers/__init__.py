"""Verbs that change a container or its files."""

"""Verbs that concern the server and its node."""

"""Verbs about the server and the node it runs on."""

"""Verbs about images and registries."""

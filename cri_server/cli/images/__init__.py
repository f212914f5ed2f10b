"""Verbs that act on images and registries."""

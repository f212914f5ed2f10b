"""Starts the server's zygote, and through it worker processes and jobs; sends them requests."""

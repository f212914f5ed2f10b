"""Starts the server's zygote, has it fork jobs and worker processes, and sends requests to the
workers."""

"""The server's side of its zygotes and workers: clients that start processes and send them
requests."""

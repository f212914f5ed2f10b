"""The server's side of its zygote and workers: clients that start processes and send them
requests."""

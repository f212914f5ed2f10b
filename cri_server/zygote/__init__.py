"""The zygotes, as the server has them."""

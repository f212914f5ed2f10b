"""The zygote: a small single-threaded process that has imported our modules and forks children on
request."""

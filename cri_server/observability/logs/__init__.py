"""The server's log: records as text, JSON or fields of the journal, with a rate limit."""

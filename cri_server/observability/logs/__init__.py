"""The server's log: messages as text, JSON or fields of the journal, with a rate limit."""

"""What the server says about itself: one line per record, as text, JSON or fields of the journal,
never too many of a kind."""

"""A small single-threaded process with our modules imported, which forks others from itself on
request."""

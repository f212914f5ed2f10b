"""How Linux is told: one facility per file, the manual pages' names and argument order, no policy."""

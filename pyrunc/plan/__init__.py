"""Plans: what a start will do, in order. `build` turns a specification into a list of operations
without touching anything, `show` prints it, `lower` turns it into the launcher's program."""

"""Plans: what a start will do, in order. `build` turns a specification into a plan without touching
the host, `show` prints the plan, `lower` turns it into the launcher's program."""

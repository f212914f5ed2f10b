"""Installation of a node: the files, generated from the tables of the programs, and the actions
that write them."""

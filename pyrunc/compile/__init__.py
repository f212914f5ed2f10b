"""What looks at the host: descriptors, sources, the root's content, id maps, facts of the machine;
the impure front half."""

"""Programs of system calls: assembles and proves them, has `pause/launcher.c` run them, and
converts its failures to errors."""

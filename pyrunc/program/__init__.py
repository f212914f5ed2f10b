"""Programs of system calls: assembles and checks programs, has `pause/launcher.c` run them, and
converts failed operations to errors."""

"""The plan lowered to system calls: assembled and proved here, run by `pause/launcher.c`, its
failures worded again here."""

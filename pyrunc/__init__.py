"""An OCI runtime. It compiles a configuration into a spec, a plan and a program; a tiny launcher
runs the program."""

__version__ = "0.1.0"

"""An OCI runtime: a configuration becomes a spec, a spec a plan, a plan a program; a tiny launcher
runs it."""

__version__ = "0.1.0"

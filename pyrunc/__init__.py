"""An OCI runtime: compiles a configuration into a spec, a plan and a program, which a tiny
launcher runs."""

__version__ = "0.1.0"

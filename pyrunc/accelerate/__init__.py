"""Optional accelerations: without this folder everything works the same, but slower."""

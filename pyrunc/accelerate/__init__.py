"""Optional accelerations. Without this folder, pyrunc does the same more slowly."""

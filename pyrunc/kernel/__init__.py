"""How Linux is told, one facility per file, no policy: the only folder that imports ctypes or prctl."""

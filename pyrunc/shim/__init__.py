"""One small process per pod: parent of the pod's processes, owner of their stdio, writer of their
logs and exit records."""

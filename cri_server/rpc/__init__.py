"""Serves gRPC: decodes requests, calls the verbs, and encodes replies and status codes."""

"""The edge: gRPC messages in, verbs called, messages and status codes out."""

"""What was asked: an OCI `config.json` read into values that cannot change, with errors that carry
their JSON path."""

"""Specifications: an OCI `config.json` parsed into immutable values, with errors that name the
JSON path."""

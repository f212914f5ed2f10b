"""The CRI messages and services, generated from `proto/api.proto` by `make build`; nothing here \
is written by hand."""

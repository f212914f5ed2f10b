"""The CNI specification 0.1.0 to 1.1.0 as Python types, shared by plugins and server. Does no I/O.

- `version`: the versions of the specification.
- `call`: a plugin's request (environment and stdin).
- `config`: the configuration of a network and of each plugin in it.
- `result`: a plugin's result.
- `errors`: a plugin's errors.
"""

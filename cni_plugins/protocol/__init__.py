"""The CNI specification 0.1.0 to 1.1.0 as values; no files, no processes. Plugins and server share
it.

`version`: the versions; `call`: a plugin's request (environment and stdin); `config`: the
configuration of a network and of each plugin in it; `result`: a plugin's answer; `errors`: its
errors.
"""

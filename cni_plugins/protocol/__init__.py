"""The CNI specification 0.1.0 to 1.1.0 as values: bytes in, values out, no files, no processes.

`version` names the versions, `call` what a plugin is asked (environment and stdin), `config` the
configuration of a network and of one plugin in it, `result` what a plugin answers, `errors` how it
refuses. Plugins and runtime share it.
"""

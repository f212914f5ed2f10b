"""The program `pyrunc`: `table` is the one list of verbs and options; `fast` runs the verbs that
callers run thousands of times, `people` puts the same table behind click for everybody who reads
help texts."""

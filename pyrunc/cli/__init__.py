"""The command line `pyrunc`: `table` lists verbs and options; `fast` runs the verbs that callers
run thousands of times; `click_front` runs the others and prints help, from the same table."""

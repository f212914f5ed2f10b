"""Attacks on the running program, and its defences.

Each test attacks `pyrunc` or `pyrunc-cri serve` like an attacker would, and checks the kernel's
view: mount tables, inotify on a canary, /proc/PID, the mode of a folder. Races do not depend on
luck: strace stops the runtime before the calls that the attack aims at, while names are swapped
(attack.py). `test_detectors.py` (slow) takes the defences out one by one, and the tests must fail.

attacks.tsv is the table of all attacks: who attacks, how, the outcome, the defence, the test. An
attack whose test is in another folder (tests/cri, tests/vm, …) has its line in the table, too.
table.py reads the table and defines its columns; test_matrix.py checks it. docs/security.md is the
threat model. Not attacked: rootless callers.
"""

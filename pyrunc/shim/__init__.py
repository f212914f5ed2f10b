"""The shim: starts and supervises the processes of many pods, holds their standard streams, and
writes their logs and exit.json."""

"""Loaded into a zygote after the shim's modules: its shims tidy up after each turn of their loop, not half a minute later."""

from __future__ import annotations

from pyrunc.shim import main

main.GIVE_BACK_AFTER_S = 0.0

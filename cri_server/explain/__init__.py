"""Explanations of errors, exit reasons and checks of `doctor`, each with a remedy.

Each class of errors, each check and the common errors of the kernel have a stable name and a page
in pages.toml. docs/errors.md is generated from these pages.
"""

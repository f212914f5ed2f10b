"""How operations run: named steps with undo, joined calls, locks by name, tasks that end
together.
"""

"""How verbs print: formats, tables, templates, progress, and errors."""

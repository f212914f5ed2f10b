"""The timeline: past calls, also those of removed pods, each with the durations of its steps and
plugins."""

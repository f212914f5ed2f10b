"""The timeline: each past call with the durations of its steps and plugins, also of removed
pods."""

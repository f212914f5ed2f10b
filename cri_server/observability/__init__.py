"""Observability: logs, metrics, statistics, container events, timelines, profiles."""

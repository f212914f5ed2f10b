"""What the server shows of itself and its pods: logs, metrics, statistics, container events,
timelines, profiles.
"""

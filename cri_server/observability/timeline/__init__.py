"""When what happened to a pod and how long it took: each call, its steps and plugins, kept for pods
that are gone."""

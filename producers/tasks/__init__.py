"""Celery's side of Pagemill: tasks that other services call by name, and what completes them."""

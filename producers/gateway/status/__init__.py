"""The status page: one look at the queues for all who watch, and how it is shown."""

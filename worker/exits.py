"""How a worker process ends: the codes that it exits with."""

DRAINED = 0
# the operator has to change something; nothing was pulled
STARTUP = 1
SETTINGS = 2
# the engine or one of the worker's loops failed
FAILED = 70

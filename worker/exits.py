"""How a worker process ends: the codes that it exits with."""

DRAINED = 0
# the operator has to change something; nothing was pulled
STARTUP = 1
SETTINGS = 2
# the engine or one of the worker's loops failed
FAILED = 70
# a step of the engine does not end
HUNG = 71
# an error of the device after which nothing works there any more, for this process
DEVICE_LOST = 72
# to the supervisor alone: the queue's server is away, and nothing was pulled
AWAY = 75

"""The long-running process that pulls jobs, feeds the engine and writes results."""

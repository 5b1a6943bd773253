"""OpenAI's batch files: an input of requests, an output of responses and one of errors."""

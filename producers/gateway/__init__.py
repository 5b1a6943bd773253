"""The HTTP gateway: OpenAI's API in front of a queue."""

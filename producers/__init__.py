"""Programs that push prompts into the queue."""

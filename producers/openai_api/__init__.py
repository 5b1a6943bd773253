"""OpenAI's wire format: requests into jobs, results into responses; knows no web server."""

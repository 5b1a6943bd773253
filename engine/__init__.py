"""The paged engine: from requests to tokens. It knows no Redis."""

"""The agent's side of the REST API: calls, retries, transfers, credentials."""

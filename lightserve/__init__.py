"""lightserve: an LLM server whose key/value cache is managed token by token."""

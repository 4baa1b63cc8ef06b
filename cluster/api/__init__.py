"""An OpenAI-compatible HTTP server before a running deployment."""

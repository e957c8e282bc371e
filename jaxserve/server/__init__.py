"""The HTTP server: OpenAI's API over AsyncLLM."""

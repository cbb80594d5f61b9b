"""A served engine: OpenAI's routes over HTTP, for many clients at once. It starts with `serve_model(...)` in `start`."""

"""The routes, and their description in /openapi.json."""

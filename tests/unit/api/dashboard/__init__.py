"""Parts of the dashboard that need no server."""

"""The dashboard in a headless Chromium."""

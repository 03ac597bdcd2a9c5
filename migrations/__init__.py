"""Alembic migrations of the farm database."""

"""Shared domain of the farm: jobs, accounts, storage and webhooks. Torch-free and web-free."""

"""Webhooks: messages, signatures and the guard against forged targets."""

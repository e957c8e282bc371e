"""The engine core: schedules requests, owns the KV blocks, drives the workers; no jax here."""

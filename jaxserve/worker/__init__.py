"""The process that owns the devices."""

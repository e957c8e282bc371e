"""Kernels for the devices jaxserve runs on, one directory an op; imports nothing from jaxserve."""

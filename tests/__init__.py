"""Tests mirror the packages; helpers that several tests share stand beside them."""

"""Tests of the loop and its models."""

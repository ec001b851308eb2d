"""Tests of the examples' tools."""

"""The tests. A package, so that a test can import its neighbours by their full name."""

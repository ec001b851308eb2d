"""The public test kit: what a user's own tests and this package's tests share."""

from __future__ import annotations

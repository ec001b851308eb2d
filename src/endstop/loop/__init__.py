"""The provider-neutral agent loop, its model clients and the tool contract. Nothing heavy is imported here."""

from __future__ import annotations

"""The demonstration: a real target system, and an agent that would repeat its write for ever."""

"""The real tools of Endstop's examples: plain functions that a guarded agent may call.

Each module stands for one example and knows nothing of the guard: a tool takes typed parameters, answers with
JSON values and raises an exception that says what it refused and why. Needs the extra `examples`.
"""

"""The real tools of Endstop's examples: plain functions that a guarded agent may call.

Each module stands for one example. Its tools take typed parameters, answer with JSON values and raise an exception that
says what was refused and why; all they know of the guard is the class that a refusal before any effect has. Needs the
extra `examples`.
"""

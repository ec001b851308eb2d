"""`endstop demo`: a public incident played against a real CRM, first without a guard and then under it.

    scenario.py     the acts and their checks      facts.py, story.py   what was found, and how it is told
    agent.py        the agent and its one tool     worker.py            the same agent as a process, to be killed
    crm.py          the CRM                        processes.py         starting and ending both

Nothing outside this package imports it but the command line.
"""

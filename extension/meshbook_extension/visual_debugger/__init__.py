"""``%mesh debug``: JupyterLab's debugger panel, and other editors, on a rank.

panel --debug_request--> kernel.debugger = `DebuggerSwitch` --> ipykernel's own debugger (the notebook's process)
                                                   \\--> `panel` --> DebugTunnel --> rank
editor --loopback, token--> DebugDoor --> DebugTunnel --> rank
"""

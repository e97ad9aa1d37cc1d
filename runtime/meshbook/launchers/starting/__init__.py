"""How the process of a host agent begins: on this machine, by a template, and on others, by a script."""

"""A call from its start to its answer, for controller and workers alike: mailboxes, interrupts, output events."""

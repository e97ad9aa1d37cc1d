"""The process of a rank: its template, main loop, control thread, mail and interrupts."""

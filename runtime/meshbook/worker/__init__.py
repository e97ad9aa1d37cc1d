"""One rank's process: its template, main loop, control thread, mail and interrupts."""

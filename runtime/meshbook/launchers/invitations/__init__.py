"""Machines that come by themselves: who holds an invitation asks for a ticket, and runs an agent."""

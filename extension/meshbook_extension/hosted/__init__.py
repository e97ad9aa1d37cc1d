"""Machines that only a hosted notebook reaches."""

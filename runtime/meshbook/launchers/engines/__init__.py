"""How engines are spoken to: their queues and allocations, drivers beside us, what they log, and whom they serve."""

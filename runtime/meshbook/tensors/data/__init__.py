"""`stream`: batches of data of this process, each rank its rows."""

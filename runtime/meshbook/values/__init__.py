"""Values as bytes: pickling, tensors out of band, shared memory."""

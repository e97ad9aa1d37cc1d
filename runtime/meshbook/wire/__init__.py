"""Messages, codec, links, frames and sockets between processes."""

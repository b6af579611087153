//! What agent and clients say to each other over HTTP, as types.

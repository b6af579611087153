//! Captured tool outputs and kernel trees, read as if the machine were here.

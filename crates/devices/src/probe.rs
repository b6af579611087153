//! Reading a source off the caller's thread, with a deadline.

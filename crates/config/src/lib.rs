//! Settings from flags, environment and a file, each with where it came from.

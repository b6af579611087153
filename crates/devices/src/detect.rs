//! Which sources a machine has.

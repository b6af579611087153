//! The environment a job needs to see the devices it was given, and no others.

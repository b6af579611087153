//! How devices are joined, from files that other programs keep about it.

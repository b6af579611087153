//! Starting processes that cannot escape: spawn, process tree, cgroups, limits, kill.

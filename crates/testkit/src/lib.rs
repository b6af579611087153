//! Starts real agents on free ports, waits on events, audits leases (for tests only).

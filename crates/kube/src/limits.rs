//! Every bound of this crate, in one place.

/// Size of a manifest, all its documents together; what etcd stores of one object is of this order.
pub const MAX_MANIFEST_BYTES: usize = 1024 * 1024;
/// Documents in one manifest.
pub(crate) const DOCUMENTS: usize = 1_024;
/// Depth of lists and maps in each other, aliases resolved.
pub(crate) const DEPTH: usize = 100;
/// YAML events that the aliases of one document may expand to.
pub(crate) const ALIASED_EVENTS: usize = 20_000;
/// Digits of a quantity that count, so that its arithmetic is exact in 128 bits.
pub(crate) const QUANTITY_DIGITS: usize = 20;
/// Characters of a wrong value that an error repeats.
pub(crate) const SHOWN_CHARS: usize = 80;
/// Containers that an error lists.
pub(crate) const SHOWN_CONTAINERS: usize = 20;
/// Whole GPUs one pod may ask for.
pub(crate) const WHOLE_GPUS: u64 = 16;
/// The smallest part of a GPU one may ask for, in thousandths.
pub(crate) const MIN_THOUSANDTHS: u64 = 100;
/// Host CPUs one pod may ask for, as in the pool's own API.
pub(crate) const CPUS: u64 = 1_000_000_000;

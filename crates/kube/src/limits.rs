//! Limits of this crate.

/// Maximum size of a manifest with all its documents, of the order of what etcd stores per object.
pub const MAX_MANIFEST_BYTES: usize = 1024 * 1024;
/// Maximum number of documents.
pub(crate) const MAX_DOCUMENTS: usize = 1_024;
/// Maximum nesting of lists and maps, with aliases expanded.
pub(crate) const MAX_DEPTH: usize = 100;
/// Maximum number of YAML events that the aliases of a document expand to.
pub(crate) const MAX_ALIASED_EVENTS: usize = 20_000;
/// Maximum number of significant digits of a quantity, so that its arithmetic is exact in 128 bits.
pub(crate) const MAX_QUANTITY_DIGITS: usize = 20;
/// Maximum number of characters of a bad value that an error repeats.
pub(crate) const MAX_SHOWN_CHARS: usize = 80;
/// Maximum number of containers that an error lists.
pub(crate) const MAX_SHOWN_CONTAINERS: usize = 20;
/// Maximum number of whole GPUs per pod.
pub(crate) const MAX_WHOLE_GPUS: u64 = 16;
/// Minimum fraction of a GPU, in thousandths.
pub(crate) const MIN_THOUSANDTHS: u64 = 100;
/// Maximum number of host CPUs per pod, as in the agent's API.
pub(crate) const MAX_CPUS: u64 = 1_000_000_000;

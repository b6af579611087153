//! What `nvidia-smi` prints, in each of its forms, and the tool as a source.
//!
//! A form is read in two steps. The first (one file per form) turns the text into the tree that `nvidia-smi -q -x`
//! prints; the second (`log`, `gpu`, `mig`, `processes`, `health`) turns that tree into devices, so that
//! what a value means is written once for all forms. Forms that only list devices or the links between them make
//! their devices themselves.

pub mod apps;
pub mod csv;
pub mod errors;
pub mod help;
pub mod list;
pub mod nvlink;
pub mod query;
pub mod sections;
pub mod source;
pub mod table;
pub mod topo;
pub mod xml;

mod cell;
mod gpu;
mod health;
mod log;
mod mig;
mod processes;
mod rows;
mod tree;

use crate::snapshot::Snapshot;
use crate::source::SourceError;

pub use source::NvidiaSmi;

/// One form of output: how to know it, and how to read it.
#[derive(Debug, Clone, Copy)]
struct Form {
    /// What people call it.
    name: &'static str,
    /// Whether a text is of this form.
    looks_like: fn(&str) -> bool,
    /// Reads a text of this form.
    parse: fn(&str) -> Result<Snapshot, SourceError>,
}

/// The forms a single run of the tool prints, those that tell most first.
const FORMS: [Form; 10] = [
    Form { name: xml::NAME, looks_like: xml::looks_like, parse: xml::parse },
    Form { name: query::NAME, looks_like: query::looks_like, parse: query::parse },
    Form { name: csv::NAME, looks_like: csv::looks_like, parse: csv::parse },
    Form { name: table::NAME, looks_like: table::looks_like, parse: table::parse },
    Form { name: apps::NAME, looks_like: apps::looks_like, parse: apps::parse },
    Form { name: list::NAME, looks_like: list::looks_like, parse: list::parse },
    Form { name: nvlink::NAME, looks_like: nvlink::looks_like, parse: nvlink::parse },
    Form { name: topo::NAME, looks_like: topo::looks_like, parse: topo::parse },
    Form { name: help::NAME, looks_like: help::looks_like, parse: help::parse },
    Form { name: errors::NAME, looks_like: errors::looks_like, parse: errors::parse },
];

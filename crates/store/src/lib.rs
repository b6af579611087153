//! Where leases survive a crash: an embedded database on one disk, with one writer.
//!
//! [`Store::open`] gives the rows the last pool left; [`Store::commit`] keeps the rows of a batch, durably and all or
//! nothing. From lease rows the store derives the audit trail ([`Store::history`], [`Store::usage`]), so that trail and
//! leases never disagree. API tokens are kept beside them, as hashes.
//!
//! Everything here blocks: whoever runs it gives it a thread of its own.

mod anchor;
mod ballast;
mod clock;
mod commit;
mod error;
mod history;
mod limits;
mod lock;
mod log;
mod notes;
mod open;
mod schema;
mod tokens;
mod trail;
mod usage;

pub use anchor::Anchor;
pub use clock::Clock;
pub use error::{CommitError, ReadError, StoreError};
pub use history::{Cursor, Page, Query};
pub use limits::BALLAST_BYTES;
pub use open::{Opened, Store};
pub use tokens::{Role, Secret, TokenId, TokenLine, TokenOwner};
pub use trail::{Event, HeldDevice, Record};
pub use usage::{By, UsageLine};

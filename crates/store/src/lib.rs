//! Where leases survive a crash: an embedded database on one disk, with one writer.
//!
//! [`Store::open`] gives the rows the last pool left; [`Store::commit`] keeps the rows of a batch, durably and all or
//! nothing. From lease rows the store derives the audit trail ([`Store::history`], [`Store::usage`]), so that trail and
//! leases never disagree. API tokens are kept beside them, as hashes.
//!
//! Everything here blocks: whoever runs it gives it a thread of its own.

mod clock;
mod commit;
mod disk;
mod error;
mod limits;
mod open;
mod tokens;
mod trail;

pub use clock::{Anchor, Clock};
pub use error::{CommitError, ReadError, StoreError};
pub use limits::BALLAST_BYTES;
pub use open::{Opened, Store};
pub use tokens::{Role, Secret, TokenId, TokenLine, TokenOwner};
pub use trail::{By, Cursor, Event, HeldDevice, Page, Query, Record, UsageLine};

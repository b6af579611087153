//! Starting a job that cannot outlive its starter.
//!
//! [`Job::prepare`] makes the job's process and stops short of running the program, so that it can be put into a group
//! or told to the agent first; [`Prepared::start`] lets it run. When a [`Job`] is dropped, or this program dies in
//! whatever way, everything the job ever started is killed ([`crate::keeper`] does it); nothing is left either when the
//! job ends by itself. The program must call [`crate::keeper::main_if_asked`] first thing in its `main`.

mod error;
mod job;
mod prepare;
mod spec;
mod terminal;

pub use error::SpawnError;
pub use job::{Job, JobEnd, JobEvent};
pub use prepare::Prepared;
pub use spec::{JobSpec, TerminalUse};

//! The two small processes between a starter and its job: starter → guard → keeper → job.
//!
//! Both adopt what the job orphans (they are child subreapers), both watch the starter, and each watches the other:
//! whoever of the three is killed, even by `kill -9`, one that kills all of the job is left. The guard only watches; the
//! keeper holds the job back until told to start it, passes signals on, reaps, and reports over a socket.
//! They are this same program started anew with a hidden argument: a fresh process with one thread may fork safely, and
//! the kernel's parent-death signal, which follows a thread, then follows the keeper. Both end when nothing of the job
//! is left.

mod child;
mod guard;
mod keep;
mod message;
mod order;
mod signals;
mod sweep;

use std::ffi::OsString;

pub(crate) use message::{FromKeeper, Link, ToKeeper};
pub(crate) use order::{Order, Placement};
pub(crate) use signals::from_the_background;

/// The first argument that makes this program a keeper.
pub(crate) const KEEPER_ARGUMENT: &str = "--gpupool-keeper";

/// Becomes a keeper, never to return, if this process was started as one; else returns at once.
///
/// Call it first thing in `main`, before threads, argument parsing and logging.
pub fn main_if_asked() {
    let mut arguments = std::env::args_os().skip(1);
    if arguments.next().is_none_or(|first| first != KEEPER_ARGUMENT) {
        return;
    }
    let arguments: Vec<OsString> = arguments.collect();
    let Some(order) = Order::parse(&arguments) else {
        eprintln!("gpupool: {KEEPER_ARGUMENT} is how gpupool starts itself beside a job; it is not for other use");
        std::process::exit(2);
    };
    guard::run(order)
}

//! The client of one agent against servers that answer as each story wants them to.

#![allow(clippy::unwrap_used, reason = "a test may panic")]

mod answers_of_every_kind_are_understood;
#[path = "../common/mod.rs"]
mod common;
mod streams_go_on_where_they_were;
mod what_is_not_wanted_any_more_is_given_back;
